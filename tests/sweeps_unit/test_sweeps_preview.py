"""What `list` prints: arms, groups and an estimate of the time."""

import sys

import pytest
from sweep_fakes import options

from headcount.sweeps import preview
from headcount.sweeps.preview import Measured
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


def test_one_trial_is_listed_in_the_singular(tmp_path, corpus, capsys):
    sweep = open_sweep(options(tmp_path / "s", corpus, verb="list", seeds=1))
    preview.print_list(sweep, calibrate=False)
    assert "group 2: K=1, 1 trial\n" in capsys.readouterr().out


@pytest.mark.parametrize("tokenizer", ["sentencepiece", "bytes"])
def test_a_vocabulary_that_the_corpus_decides_is_said_to_be_assumed(
    tmp_path, corpus, capsys, tokenizer
):
    given = options(tmp_path / "s", corpus, verb="list")
    given.config.data.tokenizer = tokenizer
    preview.print_list(open_sweep(given), calibrate=False)
    is_said = "assume a vocabulary of data.vocab_size=80" in capsys.readouterr().out
    assert is_said == (tokenizer != "bytes")


@pytest.mark.parametrize(
    "cores, gpus, is_shown", [(2, [], True), (1, [], False), (2, [{}], False)]
)
def test_cores_of_their_own_are_suggested_without_gpus(
    tmp_path, corpus, capsys, monkeypatch, cores, gpus, is_shown
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    monkeypatch.setattr(preview, "num_cores", lambda: cores)
    monkeypatch.setattr(preview, "visible_gpus", lambda: gpus)
    preview.print_list(sweep, calibrate=False)
    assert ("--resources=cores=1" in capsys.readouterr().out) == is_shown


def test_the_time_counts_starts_evaluations_and_every_arm(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    first, *others = (arm.training_flops for arm in sweep.plan.arms)
    share = sum(others) / first  # two arms with fewer keys and values
    assert 1.5 < share < 2 and sweep.groups[0].trials[0].arm == "K=4"
    measured = Measured(10.0, 0.5, 3.0, False, "K=4")
    training = 20 * 0.5 + 2 * 3.0  # 20 steps of all seeds; dev and test afterwards
    wanted = 2 * 3 * 10.0 + training * (1 + share)  # three groups start twice
    assert preview.expected_seconds(sweep, measured) == pytest.approx(wanted)
    more = options(tmp_path / "t", corpus, seeds=8, looks=[2, 4, 8])
    planned = open_sweep(more)  # at most four times the trials
    assert preview.expected_seconds(planned, measured) == pytest.approx(4 * wanted)


def test_a_calibration_measures_a_few_steps_and_says_what_it_rests_on(
    tmp_path, corpus, monkeypatch
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    rate, dev = {"steps_per_second": 200.0}, {"dev_bleu": 1.0}

    def measure(rows):
        program = CALIBRATION.replace("ROWS", str(rows))
        command = [sys.executable, "-c", program, "--workdir=x"]
        monkeypatch.setattr(preview, "train_command", lambda sweep, group: command)
        return preview.measure(sweep)

    found = measure([{"loss": 3.0}, rate, dev])
    assert found.step == pytest.approx(0.005) and found.arm == "K=4"
    assert 0 < found.start < 60 and not found.is_least
    assert f"{found.start:.0f} s to start" in str(found) and "K=4" in str(found)
    assert "more than" in str(found._replace(is_least=True))
    with pytest.raises(ValueError, match="It has ended.*--nocalibrate"):
        measure([{"loss": 3.0}, dev])


def test_a_calibration_that_prints_more_than_a_pipe_holds_ends(
    tmp_path, corpus, monkeypatch
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    program = "import sys; sys.stderr.write('x' * 200_000 + '\\nAt last.')"
    command = [sys.executable, "-c", program, "--workdir=x"]
    monkeypatch.setattr(preview, "train_command", lambda sweep, group: command)
    with pytest.raises(ValueError, match="failed: At last. "):
        preview.measure(sweep)


def test_a_plan_of_looks_says_what_it_can_find(tmp_path, corpus, capsys):
    planned = options(tmp_path / "s", corpus, verb="list", seeds=8, looks=[2, 4, 8])
    preview.print_list(open_sweep(planned), calibrate=False)
    assert "standard deviations of the paired" in " ".join(
        capsys.readouterr().out.split()
    )
