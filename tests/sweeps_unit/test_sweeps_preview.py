"""What `list` prints: arms, groups and an estimate of the time."""

import sys

import pytest
from sweep_fakes import options

from headcount.sweeps import preview
from headcount.sweeps.settings import open_sweep

CALIBRATION = """
import json, pathlib, sys
(folder,) = [x.split("=", 1)[1] for x in sys.argv if x.startswith("--workdir=")]
with open(pathlib.Path(folder) / "metrics.jsonl", "w") as file:
    for row in ROWS:
        file.write(json.dumps({"step": 4, "trial": 0} | row) + "\\n")
print("It has ended.", file=sys.stderr)
"""


def test_arms_and_groups_are_listed(tmp_path, corpus, capsys):
    sweep = open_sweep(options(tmp_path / "s", corpus, verb="list"))
    preview.print_list(sweep, calibrate=False)
    printed = capsys.readouterr().out
    assert "3 arms, 6 trials, 3 groups" in printed
    assert "group 2: K=1, 2 trials" in printed


def test_the_time_is_estimated_from_a_few_steps(tmp_path, corpus, monkeypatch):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    rate, dev = {"steps_per_second": 2.0}, {"dev_bleu": 1.0}

    def estimate(rows):
        program = CALIBRATION.replace("ROWS", str(rows))
        command = [sys.executable, "-c", program, "--workdir=x"]
        monkeypatch.setattr(preview, "train_command", lambda sweep, group: command)
        return preview.expected_seconds(sweep)

    first, *others = (arm.training_flops for arm in sweep.plan.arms)
    share = sum(others) / first  # two arms with fewer keys and values
    assert 1.5 < share < 2 and sweep.groups[0].trials[0].arm == "K=4"
    wanted = 20 / 2.0 * (1 + share)  # 20 steps of an arm's seeds, which are one group
    assert estimate([{"loss": 3.0}, rate, dev]) == pytest.approx(wanted)
    with pytest.raises(ValueError, match="It has ended.*--nocalibrate"):
        estimate([{"loss": 3.0}, dev])
