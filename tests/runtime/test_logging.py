"""What the scripts show of the log."""

import logging
import subprocess
import sys

import pytest

from headcount.runtime.logging import ROOT, SayHandler, first_line


@pytest.mark.parametrize("room, shown", [("data", 1), ("attention", 1), ("models", 0)])
def test_only_data_and_attention_inform_the_user(capsys, room, shown):
    path = str(ROOT / room / "file.py")
    for level in (logging.INFO, logging.WARNING):
        record = {"msg": f"at {level}", "levelno": level, "pathname": path}
        SayHandler().emit(logging.makeLogRecord(record))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"at {logging.INFO}"] * shown + [f"at {logging.WARNING}"]


def test_a_package_that_is_reached_through_a_link_informs_the_user(tmp_path):
    (tmp_path / "headcount").symlink_to(ROOT)
    (tmp_path / "train.conll").write_text("word tag\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from headcount.data import columns\n"
        "from headcount.runtime.logging import show_log\n"
        f"show_log(); columns.load('conll', 'train', {str(tmp_path)!r}, '')\n"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert shown == "conll train: 1 sentences\n"


def test_a_shortened_message_names_no_part_of_a_path():
    path = f"/{'run' * 30}/checkpoints/20"
    error = OSError(f"{'can not be read, ' * 15}at {path}")
    assert len(str(error)) > 300 > len(first_line(error))
    assert "/" not in first_line(error) and first_line(OSError(path)) == path
