"""heads.py on a sweep: rows of every arm, their means, and errors."""

import json
import shutil
import sys

import numpy as np
import pytest
from sweep_cases import finish

from headcount.analysis.significance import summary
from tests.runs import fails, run

HEADS = [sys.executable, "heads.py"]


@pytest.mark.parametrize(
    "verb, name, form",
    [("describe", "entropy", ".2f"), ("importance", "added_loss", ".4f")],
)
def test_every_arm_has_the_rows_of_its_groups(uninterrupted, verb, name, form):
    printed = finish([*HEADS, verb, f"--workdir={uninterrupted}"])
    rows = json.loads((uninterrupted / f"heads-{verb}-val.json").read_text())
    assert list(dict.fromkeys((row["arm"], row["seed"]) for row in rows)) == [
        (arm, seed) for arm in ("N=1", "N=2") for seed in (0, 1)
    ]
    for folder in uninterrupted.glob("groups/*"):
        trials = json.loads((folder / "group.json").read_text())
        finish([*HEADS, verb, f"--workdir={folder}"])
        own = json.loads((folder / f"heads-{verb}-val.json").read_text())
        assert {row["trial"] for row in own} == set(range(len(trials)))
        for row in own:
            trial = trials[row.pop("trial")]
            assert {"arm": trial["arm"], "seed": trial["seed"]} | row in rows
    for arm in ("N=1", "N=2"):
        of_arm = [row for row in rows if row["arm"] == arm and row["site"] == "decoder"]
        means = [
            np.mean([row[name] for row in of_arm if row["seed"] == s]) for s in (0, 1)
        ]
        found = summary(means)
        cell = f"{found.mean:{form}} ± {found.high - found.mean:{form}}"
        assert cell in printed
    assert "Means over the heads" in printed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["describe", "--trial=1"], ["--trial=1", "holds a sweep"]),
        (["prune"], ["holds a sweep", "groups"]),
    ],
)
def test_what_is_for_runs_alone_fails_with_an_error(uninterrupted, arguments, words):
    fails(run(["heads.py", *arguments, f"--workdir={uninterrupted}"]), *words)


def test_a_group_that_cannot_be_loaded_is_left_out(uninterrupted, tmp_path):
    copy = tmp_path / "sweep"
    shutil.copytree(uninterrupted, copy)
    first, *others = sorted(copy.glob("groups/*"))
    (first / "config.json").write_text("{")
    ran = run(["heads.py", "describe", f"--workdir={copy}"])
    assert ran.returncode == 0 and f"Left out {first.name}: " in ran.stderr
    arms = {
        x["arm"] for x in json.loads((copy / "heads-describe-val.json").read_text())
    }
    left = json.loads((others[0] / "group.json").read_text())[0]["arm"]
    assert arms == {left} and len(others) == 1
    (others[0] / "run.json").write_text("{")
    fails(run(["heads.py", "describe", f"--workdir={copy}"]), "run.json is damaged")


def test_a_sweep_without_checkpoints_fails_with_an_error(uninterrupted, tmp_path):
    copy = tmp_path / "sweep"
    shutil.copytree(uninterrupted, copy, ignore=shutil.ignore_patterns("checkpoints"))
    ran = run(["heads.py", "describe", f"--workdir={copy}"])
    fails(ran, f"{copy} has no checkpoint", "--finished")
