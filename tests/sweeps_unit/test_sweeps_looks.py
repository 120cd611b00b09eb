"""Seeds are added in stages, and decided arms get no more."""

import csv
import json

import pytest
from sweep_fakes import (
    edit_results,
    finish,
    only_workdir,
    options,
    read_table,
    write_corpus,
    write_report,
)

from headcount.sweeps.looks import parse_seeds
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import collect

STAGES = {"seeds": 8, "looks": [2, 4, 8], "margin": 1.0}


@pytest.fixture
def given(tmp_path):
    """A sweep with arms K=4 (baseline), K=2 and K=1, looked at after 2, 4, 8 seeds."""
    return options(tmp_path / "sweep", write_corpus(tmp_path / "corpus"), **STAGES)


def finish_stage(given, effects):
    """Finish the groups that are left, and open the sweep again.

    Args:
        effects: added to the BLEU of the trials of an arm: a constant, and how much of
            it every seed has besides.
    """
    sweep = open_sweep(given)
    for index, group in enumerate(sweep.groups):
        if (sweep.folder(group) / "result-val.json").exists():
            continue
        finish(sweep, index)
        arm = group.trials[0].arm
        constant, slope = effects.get(arm, (0.0, 0.0))

        def edit(row, constant=constant, slope=slope, group=group):
            seed = group.trials[row["trial"]].seed
            wave = (seed * 7 % 5 - 2) / 2
            return row | {"bleu": 30 + constant + slope * wave}

        edit_results(sweep, index, edit)
    return open_sweep(given)


def seeds_by_arm(sweep):
    found = {}
    for trial in sweep.plan.trials:
        found.setdefault(trial.arm, []).append(trial.seed)
    return {arm: len(seeds) for arm, seeds in found.items()}


def test_decided_arms_get_no_more_seeds(given):
    """K=2 is far off with little spread; K=1 is near with much."""
    effects = {"K=2": (-20.0, 0.001), "K=1": (0.5, 3.0)}
    sweep = open_sweep(given)
    assert seeds_by_arm(sweep) == {"K=4": 2, "K=2": 2, "K=1": 2}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 4, "K=2": 2, "K=1": 4}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}  # the last look
    collect(sweep)
    with (sweep.workdir / "verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {row["arm"]: (row["verdict"], row["seeds"]) for row in rows}
    assert found["K=2"] == ("worse", "2")
    assert found["K=1"][0] == "undecided"
    assert {row["split"] for row in rows} == {"dev"}
    text = write_report(sweep)
    assert "## Verdicts" in text and "Worse than the baseline K=4: K=2." in text
    assert "Undecided: K=1." in text and "12 trainings" not in text


def test_a_sweep_whose_arms_are_all_decided_ends(given):
    effects = {"K=2": (-20.0, 0.001), "K=1": (20.0, 0.001)}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 2, "K=2": 2, "K=1": 2}
    assert len(read_table_rows(sweep)) == 6


def read_table_rows(sweep):
    collect(sweep)
    return read_table(sweep.workdir)


def test_a_look_waits_for_all_its_trials(given):
    sweep = open_sweep(given)
    finish(sweep, 0)
    assert seeds_by_arm(open_sweep(given)) == {"K=4": 2, "K=2": 2, "K=1": 2}


def test_an_arm_that_diverges_gets_no_more_seeds(given):
    sweep = open_sweep(given)
    for index in range(len(sweep.groups)):
        finish(sweep, index)
        is_bad = sweep.groups[index].trials[0].arm == "K=2"
        change = {"bleu": None, "diverged_at": 5} if is_bad else {}
        edit_results(sweep, index, lambda row, change=change: row | change)
    assert seeds_by_arm(open_sweep(given))["K=2"] == 2


def test_looks_and_margin_belong_to_the_sweep(given):
    open_sweep(given)
    stored = json.loads((given.workdir / "sweep.json").read_text())
    assert (stored["looks"], stored["margin"]) == ([2, 4, 8], 1.0)
    later = open_sweep(only_workdir(given, looks=None, margin=None))
    assert later.looks.seeds == (2, 4, 8)
    for change in ({"looks": [2, 8]}, {"margin": 0.5}):
        with pytest.raises(ValueError, match=next(iter(change))):
            open_sweep(given._replace(**change))


@pytest.mark.parametrize(
    "seeds, looks, wanted",
    [
        (None, [], None),
        ("3", [], (3, None)),
        ("4:32", [], (32, [4, 8, 16, 32])),
        ("4:10", ["4", "7", "10"], (10, [4, 7, 10])),
    ],
)
def test_seeds_are_a_number_or_a_range(seeds, looks, wanted):
    assert parse_seeds(seeds, looks) == wanted


@pytest.mark.parametrize(
    "seeds, looks, culprit",
    [
        ("x", [], "--seeds"),
        ("0", [], "--seeds"),
        ("8:4", [], "--seeds"),
        ("1:4", [], "--looks"),
        ("8", ["4", "8"], "--looks"),
        ("4:8", ["4", "x"], "--looks"),
        ("4:8", ["2", "8"], "--looks"),
        (None, ["4", "8"], "--seeds"),
    ],
)
def test_bad_ranges_name_their_flag(seeds, looks, culprit):
    with pytest.raises(ValueError, match=culprit):
        parse_seeds(seeds, looks)
