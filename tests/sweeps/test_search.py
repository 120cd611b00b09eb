"""Optuna's search: its rounds without training, then killed in real processes."""

import json
import sys

import pytest
from sweep_cases import SMALL, finish, kill, rows, start, started, sweep, wait_for

from headcount.configs import base
from headcount.runtime.workdir import with_digest, write_json
from headcount.sweeps.search import FIRST_SEED, ROUNDS
from headcount.sweeps.settings import Options, open_sweep

RATE, DROPOUT = "optimizer.learning_rate", "model.dropout"


def opened(workdir, corpus, **changes):
    config = base.get_config()
    config.update_from_flattened_dict(SMALL | {"data.directory": str(corpus)})
    given = {
        "verb": "run",
        "workdir": workdir,
        "proposes": True,
        "config": config.lock(),
        "config_file": "configs/base.py",
        "overrides": {},
        "ablation": "kv_heads",
        "seeds": 2,
        "search": "optuna:10",
        "checkpoint": "best",
    }
    return open_sweep(Options(**(given | changes)))


def score(opened, best):
    """Write dev scores, lowest at the best learning rate, for groups without any."""
    for group in opened.groups:
        path = opened.folder(group) / "result-val.json"
        if not path.exists() and group.trials[0].is_search:
            scores = [1 + abs(t.nuisance[RATE] - best) * 1e3 for t in group.trials]
            made = {"checkpoint": "best", "options": {}, "signatures": {}}
            made |= {"step": 60, "diverged_at": None}
            made |= {"loss": 1.0, "perplexity": 2.7}
            found = [
                with_digest(made | {"trial": trial, "bits_per_byte": score})
                for trial, score in enumerate(scores)
            ]
            write_json(path, found)


def test_optuna_searches_in_rounds_with_seeds_that_are_not_reported(tmp_path, corpus):
    space = [f"{RATE}=0.001:0.01", f"{DROPOUT}=0.1,0.2"]
    best, tries = 0.008, []
    for _ in range(ROUNDS):
        now = opened(tmp_path / "s", corpus, tune=space)
        assert now.groups == opened(tmp_path / "s", corpus, tune=space).groups
        assert all(trial.is_search for trial in now.plan.trials)
        tries.append(now.plan.trials)
        score(now, best)
        waiting = opened(tmp_path / "s", corpus, tune=space, proposes=False)
        if len(tries) < ROUNDS:
            assert waiting.groups == now.groups
    arms = len(now.plan.arms)
    assert [len(trials) / arms for trials in tries] == [2, 4, 6, 8, 10]
    for arm in now.plan.arms:
        settings = [t.nuisance for t in tries[-1] if t.arm == arm.name]
        assert len({json.dumps(each) for each in settings}) == 10
        assert {RATE: 0.003, DROPOUT: 0.1} in settings  # the config's own
        assert all(0.001 <= s[RATE] <= 0.01 for s in settings)
        assert {s[DROPOUT] for s in settings} == {0.1, 0.2}
    found = opened(tmp_path / "s", corpus, tune=space).plan
    reported = [t for t in found.trials if not t.is_search]
    assert [t.seed for t in reported] == [0, 1] * arms
    assert {t.seed for t in tries[-1]} == {FIRST_SEED}
    for trial in reported:
        nearest = min(
            (t.nuisance for t in tries[-1] if t.arm == trial.arm),
            key=lambda nuisance: abs(nuisance[RATE] - best),
        )
        assert trial.nuisance == nearest


def test_later_rounds_come_nearer_to_the_best_setting(tmp_path, corpus):
    best = 0.011
    for _ in range(ROUNDS):
        now = opened(tmp_path / "s", corpus, search="optuna:30")
        score(now, best)
    misses = [[] for _ in range(ROUNDS)]
    for trial in now.plan.trials:
        of_round = misses[(trial.attempt - 1) // (30 // ROUNDS)]
        of_round.append(abs(trial.nuisance[RATE] - best))
    first, *_, last = (sum(x) / len(x) for x in misses)
    assert last < 0.7 * first


def test_a_small_space_ends_early(tmp_path, corpus):
    space = [f"{RATE}=0.001,0.003"]
    for _ in range(2):
        now = opened(tmp_path / "s", corpus, tune=space)
        score(now, 0.001)
    reported = [t.nuisance for t in now.plan.trials if not t.is_search]
    assert reported == [{RATE: 0.001}] * 2 * len(now.plan.arms)
    again = opened(tmp_path / "s", corpus, tune=space)  # creates their groups
    for verb in ("report", "status"):  # like --group, they propose nothing
        found = opened(tmp_path / "s", corpus, tune=space, verb=verb, proposes=False)
        assert found.plan == again.plan and found.groups == again.groups


def test_a_killed_search_resumes(tmp_path, corpus):
    """Both arms are one program, so a round is one group."""
    workdir = tmp_path / "sweep"
    flags = ("--search=optuna:2", "--config.train.num_steps=30")
    command = sweep("run", workdir, corpus, *flags, ablation="smoothing")
    process = start(command)
    # until the second round has its group
    wait_for(lambda: len(list(workdir.glob("groups/*/group.json"))) > 1, process)
    kill(process)
    assert "Everything is done" in finish(command)
    found = rows(workdir)
    stages = [(r["arm"], r["stage"], r["status"]) for r in found]
    for arm in ("label_smoothing=0", "label_smoothing=0.2"):
        assert stages.count((arm, "search", "done")) == 2
        assert stages.count((arm, "report", "done")) == 2
    assert len(found) == 8
    for row in found:
        assert (row["test_loss"] is None) == (row["stage"] == "search")
    for name, commands in started(workdir).items():
        assert commands[-1] == ("val" if "-search-" in name else "val,test")
    finish([sys.executable, "sweep.py", "report", f"--workdir={workdir}"])
    markdown = (workdir / "report.md").read_text()
    assert "2 settings per arm by Optuna's TPE, with seed 1000000" in markdown
    assert "4 of 4 in the tables, after 4 of the search" in markdown


def test_a_setting_without_a_default_range_is_named(tmp_path, corpus):
    ablations = f"{corpus / 'ablations.py'}:warmup"
    with pytest.raises(ValueError, match="optimizer.warmup_steps"):
        opened(tmp_path / "s", corpus, ablation=ablations)
    space = ["optimizer.warmup_steps=10:1000"]
    found = opened(tmp_path / "s", corpus, ablation=ablations, tune=space)
    assert all(
        isinstance(t.nuisance["optimizer.warmup_steps"], int) for t in found.plan.trials
    )
