"""The search for nuisance settings: by dev scores, with seeds of its own."""

import json
import math
import sys

import pytest
from sweep_fakes import (
    RATE,
    edit_results,
    finish,
    options,
    write_ablation,
    write_report,
)

from headcount.sweeps import search
from headcount.sweeps.runner import eval_command
from headcount.sweeps.search import DIVERGED, FIRST_SEED, attempts, dev_score
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import collect, count_unfinished
from headcount.tasks.base import LOSS, Metric

TUNE = [f"{RATE}=0.01,0.02"]
BLEU = Metric("bleu", "BLEU")


def test_dev_chooses_with_other_seeds_and_only_the_chosen_is_tested(tmp_path, corpus):
    given = options(tmp_path / "s", corpus, tune=TUNE, search_seeds=2)
    sweep = open_sweep(given)
    assert [g.trials[0].arm for g in sweep.groups] == ["K=4", "K=2", "K=1"]
    assert [len(g.trials) for g in sweep.groups] == [4] * 3  # two rates, two seeds
    assert all(t.seed >= FIRST_SEED for g in sweep.groups for t in g.trials)
    command = eval_command(sweep, sweep.groups[0], sweep.splits(sweep.groups[0]))
    assert "--split=val" in command
    finish(sweep, 0, splits=("val",))
    sweep = sweep.extended()
    (new,) = [g for g in sweep.groups if not g.trials[0].is_search]
    assert sweep.splits(new) == ["val", "test"]
    settings = [(t.arm, t.seed, t.nuisance[RATE]) for t in new.trials]
    assert settings == [("K=4", 0, 0.02), ("K=4", 1, 0.02)]  # where `finish` is higher
    rows = collect(sweep)
    of_arm = [row for row in rows if row["arm"] == "K=4"]
    assert [(r["stage"], r["status"], r["selected"]) for r in of_arm] == [
        ("search", "done", 0),
        ("search", "done", 0),
        ("search", "done", 1),
        ("search", "done", 1),
        ("report", "waiting", 1),
        ("report", "waiting", 1),
    ]
    assert {r["selected"] for r in rows if r["arm"] != "K=4"} == {None}
    assert open_sweep(given).groups == sweep.groups
    finish(sweep, sweep.groups.index(new))
    markdown = write_report(sweep)
    assert "seed 1000000 to 1000001" in markdown and "learning_rate=0.02" in markdown
    assert "12 trials are not done yet" in markdown  # 8 of searches, 4 that follow


def test_seeds_of_a_search_need_something_to_search(tmp_path, corpus):
    given = options(tmp_path / "s", corpus, search_seeds=2)
    with pytest.raises(ValueError, match="without --tune or --search"):
        open_sweep(given)


def chosen_trials(tmp_path, corpus, change, **changes):
    """Return the reported trials of the first arm, which has two rates to choose from.

    `change(trial)` says how a trial's dev result differs from that of `finish`.
    """
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=TUNE, **changes))
    finish(sweep, 0, splits=("val",))  # its BLEU is higher at 0.02
    trials = iter(sweep.groups[0].trials)
    edit_results(sweep, 0, lambda row: row | change(next(trials)), splits=["val"])
    return [t for t in sweep.extended().plan.trials if not t.is_search]


@pytest.mark.parametrize("loss", [2.0, float("nan"), None])
def test_the_loss_breaks_ties_between_settings(tmp_path, corpus, loss):
    losses = {0.01: loss, 0.02: 1.0}

    def change(trial):
        return {"bleu": 0.0, "loss": losses[trial.nuisance[RATE]]}

    assert {t.nuisance[RATE] for t in chosen_trials(tmp_path, corpus, change)} == {0.02}


@pytest.mark.parametrize(
    "metric, change, best",
    [
        ("exact_match", lambda rate: {"exact_match": 1 - rate}, 0.01),
        ("loss", lambda rate: {"loss": 1 + rate}, 0.01),
        ("loss", lambda rate: {"loss": 1 - rate}, 0.02),
    ],
)
def test_a_search_is_by_the_metric_of_the_sweep(tmp_path, corpus, metric, change, best):
    trials = chosen_trials(
        tmp_path, corpus, lambda trial: change(trial.nuisance[RATE]), metric=metric
    )
    assert {t.nuisance[RATE] for t in trials} == {best}


def test_a_search_is_over_when_each_setting_lost_a_seed(tmp_path, corpus):
    given = options(tmp_path / "s", corpus, tune=TUNE, search_seeds=2)
    sweep = open_sweep(given)
    for index in range(len(sweep.groups)):
        finish(sweep, index, splits=("val",))
        seeds = sorted({t.seed for t in sweep.groups[index].trials})
        trials = iter(sweep.groups[index].trials)

        def change(row, trials=trials, first=seeds[0]):
            return row | {"diverged_at": 7 if next(trials).seed == first else None}

        edit_results(sweep, index, change, splits=["val"])
    rows = collect(sweep.extended())
    assert {row["status"] for row in rows} == {"diverged", "done"}
    assert count_unfinished(sweep.plan, rows) == 0


@pytest.mark.parametrize("lost, best", [([0.02], {0.01}), ([0.01, 0.02], set())])
def test_settings_that_diverge_are_not_chosen(tmp_path, corpus, lost, best):
    def change(trial):
        return {"diverged_at": 7 if trial.nuisance[RATE] in lost else None}

    trials = chosen_trials(tmp_path, corpus, change)
    assert {t.nuisance[RATE] for t in trials} == best


@pytest.mark.parametrize(
    "scores, best",
    [
        ({0.01: [10, 40], 0.02: [30, 30]}, 0.02),  # by the mean, not the best seed
        ({0.01: [10, 40], 0.02: [90, None]}, 0.01),  # and not if one seed diverged
    ],
)
def test_a_setting_is_judged_by_the_mean_over_its_seeds(tmp_path, corpus, scores, best):
    left = {rate: iter(each) for rate, each in scores.items()}

    def change(trial):
        score = next(left[trial.nuisance[RATE]])
        return {"diverged_at": 7} if score is None else {"bleu": score}

    trials = chosen_trials(tmp_path, corpus, change, search_seeds=2)
    assert [(t.arm, t.nuisance[RATE]) for t in trials] == [("K=4", best)] * 2


def test_dev_scores_rank_lower_losses_higher():
    def row(**values):
        return {"diverged_at": None} | values

    good, bad = (dev_score(row(loss=loss), LOSS) for loss in (1.0, 2.0))
    assert good > bad > dev_score(row(loss=None), LOSS)
    assert dev_score(row(bleu=1.0) | {"diverged_at": 3}, BLEU) == DIVERGED
    assert dev_score(row(bleu=1.0), BLEU) == (1.0, -math.inf)
    assert dev_score(row(bleu=0.0, loss=1.0), BLEU) > DIVERGED


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"tune": ["model.width=1,2"]}, "--tune=model.width"),
        ({"tune": ["optimizer.learning_rat=1"]}, "optimizer.learning_rat"),
        ({"tune": [f"{RATE}=fast"]}, RATE),
        ({"tune": [f"{RATE}={'-' * 10**5}1"]}, RATE),
        ({"tune": [f"{RATE}=0.1,1e39"]}, RATE),
        ({"tune": [f"{RATE}=0.1:0.2"]}, "--search"),
        ({"tune": ["model.dropout=0.5,1.5"]}, "model.dropout"),
        ({"search": "optuna"}, "--search"),
        ({"search": "optuna:0"}, "--search"),
        ({"search": "optuna:3", "tune": [f"{RATE}=0.2:0.1"]}, "--tune"),
        ({"search": "optuna:3"}, "requirements-sweeps.txt"),
    ],
)
def test_a_search_that_makes_no_sense_is_an_error(
    tmp_path, corpus, monkeypatch, changes, named
):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as if it were not installed
    with pytest.raises(ValueError, match=named):
        open_sweep(options(tmp_path / "s", corpus, **changes))
    assert not (tmp_path / "s" / "sweep.json").exists()


@pytest.mark.parametrize("change", [("best", "last"), ('"bleu": ', '"blue": ')])
def test_a_search_ignores_results_that_are_damaged_or_of_other_settings(
    tmp_path, corpus, change
):
    given = options(tmp_path / "s", corpus, tune=TUNE)
    sweep = open_sweep(given)
    finish(sweep, 0, splits=("val",))
    path = sweep.folder(sweep.groups[0]) / "result-val.json"
    path.write_text(path.read_text().replace(*change))
    again = open_sweep(given)
    assert all(trial.is_search for trial in again.plan.trials)
    (error,) = {row["error"] for row in collect(again)} - {None}
    assert error.startswith(f"{path} ")


def test_optuna_refuses_an_ablation_that_sets_nuisance_settings(tmp_path, corpus):
    body = f'yield {{"model.mlp_dim": 32, "{RATE}": 0.01}}'
    given = {"ablation": write_ablation(tmp_path, body), "search": "optuna:3"}
    given["tune"] = [f"{RATE}=0.1:0.2"]
    with pytest.raises(ValueError, match="the ablation itself sets the nuisance"):
        open_sweep(options(tmp_path / "s", corpus, proposes=False, **given))


def test_an_exhausted_search_is_over_for_calls_that_propose_nothing(tmp_path, corpus):
    """Ten settings from a space of two: `report` and --group see what followed.

    Before it did, they do not start it.
    """
    space = {"search": "optuna:10", "tune": TUNE}
    sweep = open_sweep(options(tmp_path / "s", corpus, **space, proposes=False))
    (arm, *_), found = sweep.plan.arms, sweep.search
    tried = attempts(arm, [{RATE: 0.01}, {RATE: 0.02}], found.seeds)
    followed = search.make_trials(arm, [{RATE: 0.02}], arm.seeds)
    scored = [(trial, (30 + trial.nuisance[RATE], 0)) for trial in tried]
    assert search.next_trials([arm], found, scored, propose=False) == tried
    existing = [*scored, *((trial, None) for trial in followed)]
    for propose in (False, True):
        trials = search.next_trials([arm], found, existing, propose)
        assert trials == tried + followed


def test_nuisance_settings_of_an_ablation_may_be_words(tmp_path, corpus):
    body = """for norm in ("pre", "post"):
        yield {"model.mlp_dim": 32, "model.norm": norm}"""
    name = write_ablation(tmp_path, body)
    path = tmp_path / "own.py"
    path.write_text(path.read_text().replace(RATE, "model.norm"))
    sweep = open_sweep(options(tmp_path / "s", corpus, ablation=name))
    for index in range(2):
        finish(sweep, index, dev=30 + index, splits=("val",))
    sweep = sweep.extended()
    (new,) = [group for group in sweep.groups if not group.trials[0].is_search]
    assert [trial.nuisance for trial in new.trials] == [{"model.norm": "post"}] * 2
    finish(sweep, sweep.groups.index(new))
    assert "norm=post |" in write_report(sweep)
    rows = [row for row in collect(sweep) if row["stage"] == "report"]
    assert {row["nuisance"] for row in rows} == {json.dumps({"model.norm": "post"})}
