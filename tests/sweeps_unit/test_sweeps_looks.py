"""Seeds are added in stages, and decided arms get no more."""

import csv
import json
import math

import pytest
from sweep_fakes import (
    RATE,
    edit_results,
    finish,
    only_workdir,
    options,
    read_table,
    write_corpus,
    write_report,
)

from headcount.analysis import sequential
from headcount.sweeps.looks import parse_seeds, verdict_rows
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.status import print_status
from headcount.sweeps.table import collect

STAGES = {"seeds": 8, "looks": [2, 4, 8], "margin": "1.0"}


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


def test_decided_arms_get_no_more_seeds(given, capsys):
    """K=2 is far off with little spread; K=1 is nearer with much."""
    effects = {"K=2": (-20.0, 0.001), "K=1": (2.2, 3.0)}
    sweep = open_sweep(given)
    assert seeds_by_arm(sweep) == {"K=4": 2, "K=2": 2, "K=1": 2}
    print_status(sweep, collect(sweep))
    assert capsys.readouterr().out.count("not looked at yet") == 2
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 4, "K=2": 2, "K=1": 4}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}
    assert "seeds for every arm would take" not in write_report(sweep)  # not done yet
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}  # the last look
    collect(sweep)
    with (sweep.workdir / "verdicts.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = {row["arm"]: (row["verdict"], row["seeds"]) for row in rows}
    assert found["K=2"] == ("worse", "2")
    assert found["K=1"][0] == "undecided"
    assert not any(row["chance"] for row in rows)  # the last look has been reached
    assert next(r for r in rows if r["arm"] == "K=2")["sentence"].startswith(
        "K=2 is worse than K=4: −20.00 (BLEU; −20."
    )
    verdicts = {(row["arm"], row["verdict"]) for row in read_table(sweep.workdir)}
    assert verdicts == {("K=4", "baseline"), ("K=2", "worse"), ("K=1", "undecided")}
    assert {row["split"] for row in rows} == {"dev"}
    text = write_report(sweep)
    assert "## Verdicts" in text and "- K=2 is worse than K=4: −20.00" in text
    assert "- K=1 is undecided against K=4: " in text
    assert "1 worse, 0 equivalent, 1 undecided" in text
    assert "The verdicts took 18 training runs, " in text  # 8 + 2 + 8
    assert "8 seeds for every arm would take 24 training runs, " in text


@pytest.mark.slow
def test_an_arm_that_seeds_can_hardly_decide_gets_no_more(given, capsys):
    effects = {"K=2": (3.5, 3.0), "K=1": (0.1, 3.0)}
    finish_stage(given, effects)
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 8, "K=1": 4}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 8, "K=1": 4}
    rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
    (row,) = [row for row in rows if row["arm"] == "K=1"]
    assert (row["verdict"], row["seeds"]) == ("undecided", 4) and row["chance"] < 0.1
    assert "More seeds are unlikely to decide it" in row["sentence"]
    print_status(sweep, collect(sweep))
    assert capsys.readouterr().out.count("undecided after 4 seeds, ended") == 1
    assert "The verdicts took 20 training runs" in write_report(sweep)  # 8 + 8 + 4


def test_seeds_that_an_arm_has_already_count_however_unlikely_a_verdict_was(
    given, monkeypatch
):
    """As in a sweep that another version of this code has begun."""
    effects = {"K=2": (-20.0, 0.001), "K=1": (0.1, 3.0)}
    with monkeypatch.context() as patch:
        patch.setattr(sequential, "FUTILITY", 0.0)
        for _ in range(2):
            finish_stage(given, effects)
        sweep = finish_stage(given, effects)
        assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}
    sweep = open_sweep(given)
    assert seeds_by_arm(sweep) == {"K=4": 8, "K=2": 2, "K=1": 8}
    rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
    assert {row["arm"]: row["seeds"] for row in rows} == {"K=2": 2, "K=1": 8}


def test_a_sweep_whose_arms_are_all_decided_ends(given):
    effects = {"K=2": (-20.0, 0.001), "K=1": (20.0, 0.001)}
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 2, "K=2": 2, "K=1": 2}
    assert len(read_table_rows(sweep)) == 6


def read_table_rows(sweep):
    collect(sweep)
    return read_table(sweep.workdir)


def test_looks_need_an_arm_to_compare(tmp_path):
    corpus = write_corpus(tmp_path / "corpus")
    path = tmp_path / "own.py"
    path.write_text(
        'def one(base):\n    """Why?\n\n    Scientific: a.\n    """\n    return [{}]\n'
    )
    given = options(tmp_path / "sweep", corpus, ablation=f"{path}:one", **STAGES)
    with pytest.raises(ValueError, match="^--seeds=FIRST:LAST.*only one arm"):
        open_sweep(given)


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
    sweep = open_sweep(given)
    assert seeds_by_arm(sweep)["K=2"] == 2
    rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
    (row,) = [row for row in rows if row["arm"] == "K=2"]
    assert (row["verdict"], row["lost"]) == ("undecided", 2)
    assert math.isnan(row["low"]) and math.isnan(row["high"])
    assert "2 trials of it or K=4 diverged or failed" in row["sentence"]


def test_an_arm_that_failed_gets_no_more_seeds_and_the_others_do(given):
    effects = {"K=1": (0.5, 3.0)}
    sweep = open_sweep(given)
    (failed,) = [g for g in sweep.groups if g.trials[0].arm == "K=2"]
    path = sweep.folder(failed) / "failed.json"
    for index, group in enumerate(sweep.groups):
        if group != failed:
            finish(sweep, index)
    assert seeds_by_arm(open_sweep(given)) == {"K=4": 2, "K=2": 2, "K=1": 2}
    path.write_text(json.dumps({"error": "out of memory"}))
    assert seeds_by_arm(open_sweep(given)) == {"K=4": 4, "K=2": 2, "K=1": 4}
    path.unlink()  # the retry succeeds
    sweep = finish_stage(given, effects)
    assert seeds_by_arm(sweep) == {"K=4": 4, "K=2": 4, "K=1": 4}


def test_seeds_that_survive_decide_nothing_if_others_diverged(given):
    """What is left of an arm is no fair sample, however clear it looks."""
    sweep = finish_stage(given, {"K=2": (-20.0, 0.001), "K=1": (0.5, 3.0)})
    sweep = finish_stage(given, {"K=1": (-20.0, 0.001)})
    index = next(
        i
        for i, group in enumerate(sweep.groups)
        if group.trials[0].arm == "K=1" and len(group.trials) == 2
    )

    def edit(row):
        return row | ({"diverged_at": 3, "bleu": None} if row["trial"] == 0 else {})

    edit_results(sweep, index, edit)
    sweep = open_sweep(given)
    rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
    kinds = {row["arm"]: row["verdict"] for row in rows}
    assert kinds == {"K=2": "worse", "K=1": "undecided"}


def test_what_was_decided_stays_if_the_baseline_diverges_later(given):
    sweep = finish_stage(given, {"K=2": (-20.0, 0.001), "K=1": (0.5, 3.0)})
    sweep = finish_stage(given, {"K=1": (0.5, 3.0)})
    index = next(
        i
        for i, group in enumerate(sweep.groups)
        if group.trials[0].arm == "K=4" and group.trials[0].seed == 2
    )
    edit_results(sweep, index, lambda row: row | {"diverged_at": 3, "bleu": None})
    rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
    found = {row["arm"]: (row["verdict"], row["lost"]) for row in rows}
    assert found == {"K=2": ("worse", 0), "K=1": ("undecided", 2)}


def test_seeds_that_survive_decide_nothing_without_looks_either(tmp_path, corpus):
    given = options(tmp_path / "sweep", corpus, seeds=3)
    sweep = open_sweep(given)
    for index, group in enumerate(sweep.groups):
        finish(sweep, index, test=40 - 10 * (group.trials[0].arm == "K=2"))

    def spread(row):
        return row | {"bleu": row["bleu"] + row["trial"] / 10}

    def lose(row):
        return row | ({"diverged_at": 3, "bleu": None} if row["trial"] == 0 else {})

    verdicts = []
    for change in (spread, lose):
        edit_results(sweep, 1, change)
        rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
        (row,) = [row for row in rows if row["arm"] == "K=2"]
        verdicts.append((row["verdict"], row["lost"]))
    assert verdicts == [("worse", 0), ("undecided", 1)]


def test_seeds_added_without_a_plan_widen_the_intervals(tmp_path, corpus):
    """They are then those of looks at the numbers of seeds before, and at the last."""
    found = []

    def odd(row):
        return row | {"bleu": row["bleu"] + row["bleu"] % 2}

    for name, counts in (("fixed", [4]), ("added", [2, 4])):
        for seeds in counts:
            sweep = open_sweep(options(tmp_path / name, corpus, seeds=seeds))
            for index, group in enumerate(sweep.groups):
                finish(sweep, index)
                if group.trials[0].arm == "K=2":
                    edit_results(sweep, index, odd)
        rows = verdict_rows(sweep.plan, sweep.settings, sweep.metric, collect(sweep))
        found += [row for row in rows if row["arm"] == "K=2"]
    assert [row["looks"] for row in found] == ["", "2,4"]
    assert [row["seeds"] for row in found] == [4, 4]
    assert found[0]["difference"] == found[1]["difference"] == 0.5
    fixed, added = (row["high"] - row["low"] for row in found)
    critical = [sequential.boundaries(n, 0.05 / 2)[-1] for n in ((4,), (2, 4))]
    assert added / fixed == pytest.approx(critical[1] / critical[0])
    assert added > 1.05 * fixed


def test_tuned_arms_choose_first_and_are_looked_at_with_their_own_setting(tmp_path):
    """The search of every arm ends before any look, and its seeds are not reported."""
    given = options(
        tmp_path / "sweep",
        write_corpus(tmp_path / "corpus"),
        tune=[f"{RATE}=0.01,0.02"],
        **STAGES,
    )
    sweep = open_sweep(given)
    assert all(trial.is_search for trial in sweep.plan.trials)
    for index in range(len(sweep.groups)):
        finish(sweep, index, splits=("val",))
    sweep = open_sweep(given)
    reported = [trial for trial in sweep.plan.trials if not trial.is_search]
    assert {trial.nuisance[RATE] for trial in reported} == {0.02}
    assert sorted({trial.seed for trial in reported}) == [0, 1]
    sweep = finish_stage(given, {"K=2": (-20.0, 0.001), "K=1": (0.5, 3.0)})
    reported = [trial for trial in sweep.plan.trials if not trial.is_search]
    assert {t.seed for t in reported if t.arm == "K=2"} == {0, 1}
    assert {t.seed for t in reported if t.arm == "K=1"} == {0, 1, 2, 3}


def test_shards_of_a_sweep_that_grows_keep_their_groups(given):
    effects = {"K=1": (3.5, 3.0), "K=2": (3.5, 3.0)}
    sweep = open_sweep(given)
    before = [{g.name for g in sweep.shard(index, 2)} for index in range(2)]
    assert sum(map(len, before)) == 3
    for _ in range(2):
        sweep = finish_stage(given, effects)
        after = [{g.name for g in sweep.shard(index, 2)} for index in range(2)]
        assert all(old <= new for old, new in zip(before, after, strict=True))
        before = after
    assert sum(map(len, before)) == 9


def test_looks_and_margin_belong_to_the_sweep(given):
    open_sweep(given)
    stored = json.loads((given.workdir / "sweep.json").read_text())
    assert (stored["looks"], stored["margin"]) == ([2, 4, 8], 1.0)
    later = open_sweep(only_workdir(given, looks=None, margin=None))
    assert later.looks.seeds == (2, 4, 8)
    for change in ({"looks": [2, 8]}, {"margin": "0.5"}, {"looks": None}):
        with pytest.raises(ValueError, match=next(iter(change))):
            open_sweep(given._replace(**change))


@pytest.mark.parametrize(
    "seeds, looks, wanted",
    [
        (None, [], (None, None)),
        ("3", [], (3, None)),
        ("4:32", [], (32, [4, 6, 8, 12, 16, 24, 32])),
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
        ("0:8", [], "at 2 seeds or more"),
        ("8:4", [], "--seeds"),
        ("1:4", [], "--looks"),
        ("4:4", [], "FIRST below LAST"),
        (None, ["4", "8"], "--looks needs the range of seeds, as in --seeds=4:8"),
        (None, ["8", "4"], "as in --seeds=4:8"),
        (None, ["4"], "as in --seeds=4:32"),
        (None, ["a", "b"], "as in --seeds=4:32"),
        ("8", ["4", "8"], "--looks"),
        ("4:8", ["4", "x"], "--looks"),
        ("4:8", ["2", "8"], "--looks"),
        ("99999999999", [], "--seeds must be at most 10,000, got 99999999999"),
        ("4:99999999999", [], "--seeds must be at most 10,000"),
    ],
)
def test_bad_ranges_name_their_flag(seeds, looks, culprit):
    with pytest.raises(ValueError, match=culprit):
        parse_seeds(seeds, looks)
