"""docs/walkthrough.md shows what attention/example.py prints, and NumPy agrees."""

import re
from pathlib import Path

from headcount.attention import example

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "walkthrough.md").read_text()


def test_the_walkthrough_shows_what_the_example_prints(capsys):
    example.main()
    printed = capsys.readouterr().out
    parts = re.split(r"^\d\. .*$", printed, flags=re.MULTILINE)[1:]
    shown = re.findall(r"```text\n(.*?)\n```", TEXT, re.DOTALL)
    assert [part.strip("\n") for part in parts] == shown
    titles = re.findall(r"^\d\. .*$", printed, re.MULTILINE)
    headings = re.findall(r"^## (\d\. .*)$", TEXT, re.MULTILINE)
    numbers = [title[0] for title in titles]
    assert numbers == [heading[0] for heading in headings[: len(titles)]]


def test_by_hand_and_by_the_package_are_the_same(capsys):
    example.main()
    printed = capsys.readouterr().out
    assert printed.count(": the same") == 4
    assert "NOT the same" not in printed
