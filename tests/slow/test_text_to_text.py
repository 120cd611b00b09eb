"""The commands of docs/guides/text_to_text.md, on small generated corpora."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from headcount.data import numbers
from tests.runs import ROOT, SMALL, read, succeed

GUIDE = (ROOT / "docs" / "guides" / "text_to_text.md").read_text()
NAMES = ("Ann", "Bo", "Cleo", "Dan", "Eve")
THINGS = ("letter", "song", "map", "book")


def summaries(rng):
    """Number phrases in any order, and the same in order."""
    found = rng.integers(1, 100, 3)
    words = [numbers.phrases([n], "en")[0] for n in found]
    ordered = [numbers.phrases([n], "en")[0] for n in sorted(found)]
    return ", ".join(words), ", ".join(ordered)


def answers(rng):
    """A table of facts with a question."""
    people, things = rng.permutation(NAMES)[:3], rng.permutation(THINGS)[:3]
    facts = [f"{who} has the {what}." for who, what in zip(people, things, strict=True)]
    chosen = rng.integers(3)
    question = f"question: who has the {things[chosen]}? context: {' '.join(facts)}"
    return question, people[chosen]


def commands(section: str) -> list[list[str]]:
    """Return the training and evaluation commands of a section of the guide."""
    text = GUIDE.split(f"## {section}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(python .*?)```", text, re.DOTALL)
    lines = blocks[0].replace("\\\n", " ").splitlines()
    return [shlex.split(line)[1:] for line in lines if line.startswith("python")]


@pytest.mark.parametrize(
    "section, make", [("Summarisation", summaries), ("Question answering", answers)]
)
def test_the_guide_trains_and_scores_with_its_metrics(section, make, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 200), ("val", 20), ("test", 20)):
        rows = ["\t".join(make(rng)) for _ in range(count)]
        (tmp_path / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    workdir = tmp_path / "run"
    training, scoring = (
        [re.sub(r"--workdir=\S+", f"--workdir={workdir}", word) for word in words]
        for words in commands(section)
    )
    training = [word.replace("FOLDER", str(tmp_path)) for word in training]
    small = SMALL | {"seeds": 1, "data.vocab_size": 120, "data.batch_tokens": 1024}
    succeed([*training, *(f"--config.{key}={value}" for key, value in small.items())])
    succeed(scoring)
    (row,) = read(workdir, "result-test.json")
    config = read(workdir, "config.json")
    names = config["task"]["metrics"].split(",")
    assert all(np.isfinite(row[name]) for name in [*names, "loss"])
    assert row["loss"] < np.log(120) * 0.95, "less than of a uniform guess"
    assert set(row["signatures"]) <= set(names)
    assert Path(config["data"]["directory"]) == tmp_path
