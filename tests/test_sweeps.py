"""Sweeps without training: what is opened, kept on disk, selected and reported."""

import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headcount.analysis.report_plots import looks
from headcount.configs import base
from headcount.configs import run as config_of_run
from headcount.data import corpora
from headcount.runtime.workdir import write_json
from headcount.sweeps import launchers, opening, pod, reporting, show
from headcount.sweeps.opening import Options, chosen, open_sweep
from headcount.sweeps.records import DECODING
from headcount.sweeps.runner import (
    Runner,
    Stopped,
    eval_command,
    train_command,
    workers_here,
)
from headcount.sweeps.search import FIRST_SEED
from headcount.sweeps.store import TRAINED, Sweep, locked, pace

ROOT = Path(__file__).resolve().parent.parent
RATE = "optimizer.learning_rate"
SENTENCES = [f"the dog number {i} sleeps in the sun" for i in range(12)]


def three_splits(folder):
    """A folder of text, with the same pairs in each split."""
    folder.mkdir()
    for split in ("train", "val", "test"):
        for language in ("en", "de"):
            text = "".join(f"{s}\n" for s in SENTENCES)
            (folder / f"{split}.{language}").write_text(text)
    return folder


@pytest.fixture
def corpus(tmp_path):
    return three_splits(tmp_path / "corpus")


def options(workdir, corpus, **changes):
    config = base.get_config()
    config.update_from_flattened_dict(
        {
            "data.name": "text",
            "data.directory": str(corpus),
            "data.vocab_size": 80,
            "model.width": 32,
            "model.mlp_dim": 32,
            "model.num_encoder_layers": 1,
            "model.num_decoder_layers": 1,
            "train.num_steps": 20,
        }
    )
    given = {
        "config": config.lock(),
        "config_file": "configs/base.py",
        "overrides": {"train.num_steps": 20},
        "ablation": "kv_heads",
        "seeds": 2,
        "workdir": workdir,
        "match": None,
        "tune": [],
        "search": None,
        "search_seeds": 1,
        "checkpoint": "best",
        "metric": None,
        "test_split": None,
        "group_size": 16,
        "note": None,
        "verb": "run",
        "proposes": True,
    }
    return Options(**(given | changes))


def finish(sweep: Sweep, index: int, *, dev=30.0, test=40.0, splits=("val", "test")):
    """Leave in a group's folder what train.py and eval.py would."""
    group = sweep.groups[index]
    folder = sweep.folder(group)
    lines = []
    for step in (10, 20):
        for trial in range(len(group.trials)):
            pace = {"steps_per_second": 2.0, "tokens_per_second": 1000.0}
            lines.append({"step": step, "trial": trial, "loss": 3.0, **pace})
            lines.append({"step": step, "trial": trial, "dev_bleu": dev + step / 10})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 2')  # cut off by a kill
    run = {"num_parameters": 9000, "devices": ["cpu: cpu"], "attention": {"cross": "x"}}
    run |= {"versions": {"jax": "1"}, "python": "3", "commit": "c0ffee"}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / TRAINED).touch()
    for split in splits:
        rows = []
        for i, trial in enumerate(group.trials):
            rate = trial.nuisance.get(RATE, 0)
            score = (dev if split == "val" else test) + trial.seed + 100 * rate
            row = {"trial": i, "step": 20, "checkpoint": "best", "diverged_at": None}
            row |= {"bleu": score, "chrf": score + 10, "exact_match": 0.5}
            row |= {"loss": 2 - score / 100 + index * trial.seed / 100}
            row |= {"signature": "nrefs:1", "decoding": DECODING}
            rows.append(row)
            suffix = f"-{i}" if len(group.trials) > 1 else ""
            words = [s.replace("sun", f"{score:.0f}") for s in SENTENCES]
            (folder / f"{split}{suffix}.txt").write_text("\n".join(words) + "\n")
        (folder / f"result-{split}.json").write_text(json.dumps(rows))


def table(workdir):
    with sqlite3.connect(workdir / "sweep.sqlite") as database:
        database.row_factory = sqlite3.Row
        rows = [dict(row) for row in database.execute("SELECT * FROM trials")]
    database.close()
    return rows


def test_a_workdir_remembers_its_sweep(tmp_path, corpus):
    first = open_sweep(options(tmp_path / "s", corpus))
    assert [a.name for a in first.plan.arms] == ["K=4", "K=2", "K=1"]
    nothing = options(tmp_path / "s", corpus, config=None, ablation=None, seeds=None)
    again = open_sweep(nothing)
    assert again.groups == first.groups and again.settings == first.settings
    old = {k: v for k, v in first.settings.items() if not k.startswith("search")}
    del old["arms"]
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(old))
    assert open_sweep(nothing).groups == first.groups
    assert open_sweep(options(tmp_path / "s", corpus)).groups == first.groups


def test_status_only_reads(tmp_path, corpus):
    """So that it serves who may not write in the folder."""

    def contents():
        return {p: p.stat().st_mtime_ns for p in [workdir, *workdir.rglob("*")]}

    workdir = tmp_path / "s"
    sweep = open_sweep(options(workdir, corpus))
    finish(sweep, 0)
    shutil.rmtree(sweep.folder(sweep.groups[2]))  # as one that is still to come
    (workdir / ".plan").unlink()  # a lock, which to open is to write
    before = contents()
    told = open_sweep(options(workdir, corpus, verb="status"))
    assert [row["status"] for row in told.rows()[::2]] == ["done", *["waiting"] * 2]
    assert contents() == before
    assert told.groups == sweep.groups


def test_the_command_of_a_part_is_that_of_the_whole(tmp_path, corpus, monkeypatch):
    argv = ["sweep.py", "--config=configs/base.py", "--group_size=4", "--group=1"]
    monkeypatch.setattr(sys, "argv", [*argv, "--shard=0/2", "--nocalibrate"])
    opened = open_sweep(options(tmp_path / "s", corpus))
    command = "python sweep.py run --config=configs/base.py --group_size=4"
    assert opened.settings["command"] == command


def test_the_command_is_of_the_whole_where_flags_have_spaces(
    tmp_path, corpus, monkeypatch
):
    kept = ["--config", "configs/base.py", "--group_size", "4", "--note=on --group 1"]
    where = ["--group", "99", "--launcher", "local", "-shard", "0/2", "--calibrate"]
    where += ["--resources", "num_gpus=1", "--coordinator_timeout", "9"]
    for argv in (where + kept, kept + where, [*kept[:2], *where, *kept[2:]]):
        monkeypatch.setattr(sys, "argv", ["sweep.py", *argv])
        opened = open_sweep(options(tmp_path / "s", corpus))
        words = shlex.split(opened.settings["command"])
        assert words == ["python", "sweep.py", "run", *kept]


def test_a_folder_without_the_published_references_is_refused_at_first(
    tmp_path, corpus, monkeypatch
):
    """Else eval.py would miss them, when all is trained."""
    opened = options(tmp_path / "s", corpus)
    opened.config.data.name = "multi30k"
    monkeypatch.setattr(corpora, "load", lambda *_: (SENTENCES, SENTENCES))
    asked = []
    with pytest.raises(FileNotFoundError, match="holds no tok/val.lc.norm.tok.de"):
        open_sweep(opened)
    assert not (tmp_path / "s").exists()
    monkeypatch.setattr(corpora, "tokenized_references", lambda *a: asked.append(a))
    open_sweep(opened)
    splits = ("val", "test_2016_flickr")
    assert asked == [("multi30k", "de", split, str(corpus)) for split in splits]


def test_more_seeds_keep_what_there_is(tmp_path, corpus):
    few = open_sweep(options(tmp_path / "s", corpus))
    more = open_sweep(options(tmp_path / "s", corpus, seeds=3))
    kept = {trial.id for trial in few.plan.trials}
    assert len(more.plan.trials) == 9 and len(kept) == 6
    assert kept < {trial.id for trial in more.plan.trials}
    names = [group.name for group in more.groups]
    assert {group.name for group in few.groups} < set(names) and len(names) == 6
    again = open_sweep(options(tmp_path / "s", corpus, seeds=None))
    assert again.groups == more.groups


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"ablation": "own.py"}, "must say which function of .*, as in own.py:depth"),
        ({"ablation": "haeds"}, "no ablation 'haeds' .* did you mean heads"),
        ({"ablation": "none.py:x"}, "no Python file none.py"),
        ({"ablation": "configs/ablations.py:over"}, "over .* lacks a line .Scientific"),
        ({"seeds": 0}, "The sweep is empty: it has 3 arms and 0 seeds"),
        ({"metric": "rouge"}, "--metric must be one of bleu, .* 'rouge'"),
        ({"ablation": None}, "holds no sweep; --config and --ablation are needed"),
        (
            {"config": None, "verb": "report"},
            "holds no sweep; start one with sweep.py run",
        ),
    ],
)
def test_bad_input_is_named(tmp_path, corpus, changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_sweep(options(tmp_path / "s", corpus, **changes))
    assert not (tmp_path / "s" / "sweep.json").exists()


def test_another_sweeps_workdir_is_refused(tmp_path, corpus):
    there = open_sweep(options(tmp_path / "s", corpus))
    other = options(tmp_path / "s", corpus, ablation="heads", checkpoint="last")
    other.config.unlock()
    other.config.model.mlp_dim = 64
    sentence = (
        r"another sweep: ablation \(there 'kv_heads', now 'heads'\), .*mlp_dim \(there "
        r"32, now 64\), checkpoint"
    )
    with pytest.raises(ValueError, match=sentence):
        open_sweep(other)
    assert open_sweep(options(tmp_path / "s", corpus)).groups == there.groups


def test_a_sweep_of_before_a_key_existed_goes_on(tmp_path, corpus):
    """With the ids of its trials; what is not the key's default is another sweep."""
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    path = tmp_path / "s" / "sweep.json"
    there = json.loads(path.read_text())
    del there["base"]["model"]["attention"]["qk_norm"], there["base"]["mesh"]
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").mkdir()
    write_json(path, there)
    alone = given._replace(config=None, ablation=None, seeds=None)
    first, again = open_sweep(alone), open_sweep(given)
    assert again.groups == first.groups
    assert json.loads(path.read_text()) == there
    given.config.unlock()
    given.config.model.attention.qk_norm = True
    with pytest.raises(ValueError, match=r"qk_norm \(there None, now True\)"):
        open_sweep(given)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"seeds": 1}, r"seeds \(there 2, now 1\).*more seeds may be added, none left"),
        ({"seeds": 0}, r"seeds \(there 2, now 0\)"),
        ({"seeds": 3, "verb": "status"}, r"now 3\); leave that out: status takes the"),
        ({"seeds": 3, "verb": "list"}, "leave that out: list takes the sweep as it is"),
        ({"group_size": 1, "verb": "status"}, "group_size"),
        ({"metric": "chrf", "verb": "report"}, r"metric \(there 'bleu', now 'chrf'\)"),
        ({"metric": "rouge", "verb": "report"}, "--metric must be one of"),
        ({"match": "flops"}, r"match \(there None, now 'flops'\)"),
        ({"tune": [f"{RATE}=0.1"]}, "tune"),
    ],
)
@pytest.mark.parametrize("config", ["again", None])
def test_only_run_changes_a_sweep_and_takes_nothing_from_it(
    tmp_path, corpus, config, changes, sentence
):
    given = options(tmp_path / "s", corpus)
    open_sweep(given)
    there = (tmp_path / "s" / "sweep.json").read_text()
    if config is None:
        given = given._replace(config=None, ablation=None, seeds=None)
    with pytest.raises(ValueError, match=sentence):
        open_sweep(given._replace(**changes))
    told = open_sweep(given._replace(verb="report", note="A note of one report."))
    assert (
        told.settings["note"] and (tmp_path / "s" / "sweep.json").read_text() == there
    )


@pytest.mark.parametrize(
    "best, metric", [("dev_exact_match", "exact_match"), ("dev_loss", "bleu")]
)
def test_a_sweep_is_by_the_metric_of_its_config(tmp_path, corpus, best, metric):
    """Unless that is the loss."""
    opened = options(tmp_path / "s", corpus)
    opened.config.train.best_metric = best
    assert open_sweep(opened).settings["metric"] == metric
    given = options(tmp_path / "t", corpus, metric="chrf", config=opened.config)
    assert open_sweep(given).settings["metric"] == "chrf"


def test_no_verb_but_run_begins_a_sweep(tmp_path, corpus):
    with pytest.raises(ValueError, match="holds no sweep; start one with sweep.py run"):
        open_sweep(options(tmp_path / "s", corpus, verb="report"))
    assert not (tmp_path / "s").exists()


ARMS = '''
def sizes(base):
    """Which width?

    Scientific: model.mlp_dim.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    BODY
'''


def own(tmp_path, body):
    path = tmp_path / "own.py"
    path.write_text(ARMS.replace("BODY", body))
    return f"{path}:sizes"


YIELD = 'yield from ({"model.mlp_dim": F} for F in '


def test_an_edited_ablation_is_refused_and_what_was_trained_is_reported(
    tmp_path, corpus
):
    given = options(tmp_path / "s", corpus, ablation=own(tmp_path, YIELD + "(32, 64))"))
    first = open_sweep(given)
    assert open_sweep(given).settings == first.settings
    for index in range(2):
        finish(first, index)
    edits = {
        YIELD + "(32,))": r"of other arms .*: arm F=64 \(there .*, now 'unset'\)",
        YIELD + "(32, 64, 96))": r"of other arms .*: arm F=96 \(there 'unset', now",
        YIELD + "(64, 32, 64) if F != 32)": "arm F=32",
        'yield {"model.mlp_dim": 64, "model.dropout": 0.2}': "arm F=32",
    }
    edits[
        'yield {"model.mlp_dim": 32}; yield {"model.mlp_dim": 64, "model.width": 64}'
    ] = r"arm F=64.model.width \(there 'unset', now 64\)"
    for body, sentence in edits.items():
        own(tmp_path, body)
        with pytest.raises(ValueError, match=sentence):
            open_sweep(given)
    alone = given._replace(config=None, ablation=None, seeds=None)
    (tmp_path / "own.py").unlink()  # what the workdir remembers is enough
    for verb in ("status", "report", "run"):
        again = open_sweep(alone._replace(verb=verb))
        assert again.groups == first.groups and again.settings == first.settings
    reporting.write(again, again.collect(), 1)
    assert "F=64" in (tmp_path / "s" / "report.md").read_text()


def test_an_ablations_own_seeds_may_grow_but_not_go(tmp_path, corpus):
    body = 'yield from ({"model.mlp_dim": 32, "seed": s} for s in range(2))'
    given = options(tmp_path / "s", corpus, ablation=own(tmp_path, body))
    open_sweep(given)
    own(tmp_path, body.replace("2", "1").replace("31", "32"))
    with pytest.raises(ValueError, match=r"arm F=32.seeds \(there \[0, 1\], now \[0\]"):
        open_sweep(given)
    own(tmp_path, body.replace("range(2)", "range(3)"))
    assert len(open_sweep(given).plan.trials) == 3


@pytest.mark.parametrize(
    "body, sentence",
    [
        (
            "yield {'model.mlp_dim': base.model.atention}",
            "KeyError: 'atention' Did you mean \"attention\"",
        ),
        ("return None", "It returns nothing; it must yield its arms"),
        ("return 3", "TypeError: 'int' object is not iterable"),
        (
            "yield ('model.mlp_dim', 32)",
            r"An arm must be a dict .* got \('model.mlp_dim', 32\)",
        ),
        ("yield {3: 4}", r"An arm must be a dict .* got \{3: 4\}"),
        (
            "yield {'model.mlp_dim': {32}}",
            "The values of an arm must be plain numbers or words, got",
        ),
        ("yield {", "This is not Python: "),
        (
            "yield {'model.attention.num_heads': 'four'}",
            "Arm four sets model.attention.num_heads to 'four'; it must be of type int",
        ),
        (
            "yield {'model.mlp_dims': 4}",
            "Arm mlp_dims=4 sets model.mlp_dims, which is no config key. Did you mean",
        ),
        (
            "yield {'model.attention.num_heads': 5}",
            r"Arm N=5 can't be built: .*\b5\b",
        ),
    ],
)
def test_what_is_wrong_with_an_own_ablation_is_named(tmp_path, corpus, body, sentence):
    name = own(tmp_path, body)
    with pytest.raises(ValueError, match=f"^--ablation={name}(, line 9)?: {sentence}"):
        open_sweep(options(tmp_path / "s", corpus, ablation=name))
    assert not (tmp_path / "s").exists()


def test_groups_and_shards_are_chosen(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, group_size=1))
    groups = sweep.groups
    assert len(groups) == 6 and chosen(sweep, None, None) is None
    assert (
        chosen(sweep, "3", None) == chosen(sweep, groups[3].name, None) == groups[3:4]
    )
    assert chosen(sweep, None, "1/4") == [groups[1], groups[5]]
    for group, shard in (("6", None), ("K", None), (None, "3/3"), (None, "one")):
        asked = f"--{'group' if group else 'shard'} must be .*, got {group or shard}"
        with pytest.raises(ValueError, match=f"^{asked}[.]$"):
            chosen(sweep, group, shard)
    tune = [f"{RATE}=0.01,0.02"]
    searched = open_sweep(options(tmp_path / "t", corpus, tune=tune))
    with pytest.raises(ValueError, match="--shard deals out groups that are known"):
        chosen(searched, None, "0/2")


def test_the_table_is_made_anew_from_what_is_on_disk(tmp_path, corpus):
    """Rows appear once, whenever and however often they are collected."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    sweep.collect()
    assert [row["status"] for row in table(tmp_path / "s")] == ["waiting"] * 6
    finish(sweep, 0)
    finish(sweep, 1, splits=("val",))
    failed = sweep.folder(sweep.groups[2]) / "failed.json"
    failed.write_text(json.dumps({"error": "no memory"}))
    for _ in range(2):
        rows = sweep.collect()
    found = table(tmp_path / "s")
    assert len(found) == 6 and {r["id"] for r in found} == {r["id"] for r in rows}
    assert [r["status"] for r in rows] == ["done"] * 2 + ["dev scored"] * 2 + [
        "failed"
    ] * 2
    first = rows[0]
    assert first["test_bleu"] == 40 and first["dev_chrf"] == 40 and first["seed"] == 0
    assert first["parameters"] == 9000 and first["commit"] == "c0ffee"
    assert first["tokens_per_second"] == 1000
    assert first["seconds"] == 5  # 20 steps at 2 a second, shared by two trials
    assert rows[-1]["error"] == "no memory"
    with (tmp_path / "s" / "sweep.csv").open() as file:
        assert [r["id"] for r in csv.DictReader(file)] == [r["id"] for r in rows]


def test_dev_chooses_with_seeds_of_its_own_and_test_is_not_looked_at(tmp_path, corpus):
    tune = [f"{RATE}=0.01,0.02"]
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=tune, search_seeds=2))
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
    rows = sweep.collect()
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
    again = open_sweep(options(tmp_path / "s", corpus, tune=tune, search_seeds=2))
    assert again.groups == sweep.groups
    finish(sweep, sweep.groups.index(new))
    reporting.write(sweep, sweep.collect(), 3)
    markdown = (tmp_path / "s" / "report.md").read_text()
    assert (
        "with seed 1000000 to 1000001" in markdown and "learning_rate=0.02" in markdown
    )
    assert "12 trials are not done yet" in markdown  # 8 of searches, 4 that follow


def reported(tmp_path, corpus, dev, **changes):
    """The trials to report of the first arm, which has two rates to choose from.

    `dev` says what the result of each trial of its search has otherwise than `finish`.
    """
    tune = [f"{RATE}=0.01,0.02"]
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=tune, **changes))
    finish(sweep, 0, splits=("val",))  # its BLEU is higher at 0.02
    group = sweep.groups[0]
    path = sweep.folder(group) / "result-val.json"
    rows = zip(json.loads(path.read_text()), group.trials, strict=True)
    path.write_text(json.dumps([row | dev(trial) for row, trial in rows]))
    return [t for t in sweep.extended().plan.trials if not t.is_search]


@pytest.mark.parametrize("loss", [2.0, float("nan")])
def test_settings_that_score_the_same_are_told_apart_by_the_loss(
    tmp_path, corpus, loss
):
    losses = {0.01: loss, 0.02: 1.0}

    def dev(trial):
        return {"bleu": 0.0, "loss": losses[trial.nuisance[RATE]]}

    assert {t.nuisance[RATE] for t in reported(tmp_path, corpus, dev)} == {0.02}


def test_a_search_is_by_the_metric_of_the_sweep(tmp_path, corpus):
    def dev(trial):
        return {"exact_match": 1 - trial.nuisance[RATE]}

    trials = reported(tmp_path, corpus, dev, metric="exact_match")
    assert {t.nuisance[RATE] for t in trials} == {0.01}


@pytest.mark.parametrize("lost, best", [([0.02], {0.01}), ([0.01, 0.02], set())])
def test_settings_that_diverge_are_not_chosen(tmp_path, corpus, lost, best):
    def dev(trial):
        return {"diverged_at": 7 if trial.nuisance[RATE] in lost else None}

    assert {t.nuisance[RATE] for t in reported(tmp_path, corpus, dev)} == best


@pytest.mark.parametrize(
    "scores, best",
    [
        ({0.01: [10, 40], 0.02: [30, 30]}, 0.02),  # by the mean, not the best seed
        ({0.01: [10, 40], 0.02: [90, None]}, 0.01),  # and not where one diverged
    ],
)
def test_a_setting_is_judged_by_all_its_seeds(tmp_path, corpus, scores, best):
    left = {rate: iter(each) for rate, each in scores.items()}

    def dev(trial):
        score = next(left[trial.nuisance[RATE]])
        return {"diverged_at": 7} if score is None else {"bleu": score}

    trials = reported(tmp_path, corpus, dev, search_seeds=2)
    assert [(t.arm, t.nuisance[RATE]) for t in trials] == [("K=4", best)] * 2


def test_the_pace_of_a_run_is_by_its_time():
    """Of rows that took 10 and 15 seconds; one of the steps that compiled has none."""
    rows = [
        {"step": 10, "trial": 0, "steps_per_second": 1.0, "tokens_per_second": 1000.0},
        {"step": 10, "trial": 1, "steps_per_second": 1.0, "tokens_per_second": 1000.0},
        {"step": 40, "trial": 0, "steps_per_second": 2.0, "tokens_per_second": 3000.0},
        {"step": 40, "trial": 0, "dev_bleu": 30.0},
    ]
    assert pace(rows) == (pytest.approx(2200), pytest.approx(25))
    assert pace(rows[3:]) == (None, 0)


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"tune": ["model.width=1,2"]}, "may set what the ablation names as nuisance"),
        (
            {"tune": ["optimizer.learning_rat=1"]},
            "no config key .*optimizer.learning_rate",
        ),
        ({"tune": [f"{RATE}=fast"]}, "needs numbers"),
        ({"tune": [f"{RATE}={'-' * 10**5}1"]}, "needs numbers"),
        ({"tune": [f"{RATE}=0.1,1e39"]}, "must be from 0 to below 3.4"),
        ({"tune": [f"{RATE}=0.1:0.2"]}, "only a search takes, as with --search"),
        ({"tune": ["model.dropout=0.5,1.5"]}, "must be from 0 to below 1, got 1.5"),
        ({"search": "optuna"}, "--search must be optuna:N"),
        ({"search": "optuna:0"}, "--search must be optuna:N"),
        ({"search": "optuna:3", "tune": [f"{RATE}=0.2:0.1"]}, "LOW below HIGH"),
        ({"search": "optuna:3"}, "This needs the package optuna: pip install -r"),
    ],
)
def test_a_search_that_makes_no_sense_is_named(
    tmp_path, corpus, monkeypatch, changes, sentence
):
    monkeypatch.setitem(sys.modules, "optuna", None)  # as where it isn't installed
    with pytest.raises(ValueError, match=sentence):
        open_sweep(options(tmp_path / "s", corpus, **changes))
    assert not (tmp_path / "s" / "sweep.json").exists()


def test_a_claim_lasts_as_long_as_a_process_has_it(tmp_path):
    path = tmp_path / "claim"
    with locked(path, wait=False) as mine:
        sleeping = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = subprocess.Popen(
            sleeping, stdin=subprocess.PIPE, pass_fds=(mine.fileno(),)
        )
        with locked(path, wait=False) as other:
            assert other is None
    with locked(path, wait=False) as other:  # ours is given back, the child has it
        assert other is None
    child.communicate()
    with locked(path, wait=False) as other:
        assert other is not None


def test_the_printed_command_names_every_setting(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    command = train_command(sweep, sweep.groups[1])
    assert "--config.train.num_steps=20" in command
    assert "--config.model.attention.num_kv_heads=2" in command
    (path,) = [c.split("=", 1)[1] for c in command if c.startswith("--trials=")]
    assert json.loads(Path(path).read_text()) == [{"seed": 0}, {"seed": 1}]
    Path(path).write_text("[{")  # damaged: it is known what it holds
    train_command(sweep, sweep.groups[1])
    assert json.loads(Path(path).read_text()) == [{"seed": 0}, {"seed": 1}]


def test_groups_begin_with_the_config_of_the_sweep(tmp_path, corpus):
    """Not with what its file has become since, which no row of the table would tell."""
    opened = options(tmp_path / "s", corpus)
    sweep = open_sweep(opened)
    (config,) = [
        word.split("=", 1)[1]
        for word in train_command(sweep, sweep.groups[1])
        if word.startswith("--config=")
    ]
    path, _, workdir = config.partition(":")
    assert Path(path).resolve() == ROOT / "configs" / "run.py"
    assert config_of_run.get_config(workdir).to_dict() == opened.config.to_dict()


def test_a_report_holds_what_was_computed(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, note="A <shared> machine."))
    with pytest.raises(ValueError, match="Nothing has finished in .* yet"):
        reporting.write(sweep, sweep.collect(), 5)
    finish(sweep, 1)
    with pytest.raises(ValueError, match="The baseline K=4 has not finished yet"):
        reporting.write(sweep, sweep.collect(), 5)
    finish(sweep, 0, dev=31, test=40)
    reporting.write(sweep, sweep.collect(), 3)
    html = (tmp_path / "s" / "report.html").read_text()
    markdown = (tmp_path / "s" / "report.md").read_text()
    sd = np.std([40, 41], ddof=1)
    for text in (html, markdown):
        assert f"40.50 ± {sd:.2f}" in text
        assert "How many heads may share their keys and values?" in text
        assert "2 trials are not done yet" in text
        assert "c0ffee" in text and "9,000" in text
        assert text.count("reference") == (1 if text is html else 3)
        # by 0 and by 0.01 more: Student's t of one degree of freedom is 12.706
        for cell in ("1.5950", "1.6000", "+0.0050", "−0.0585 to +0.0685"):
            assert cell in text
    assert "A &lt;shared&gt; machine." in html and html.count("<svg") == 2
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(http[^)]*\)|@import', html)
    assert not outside and "<script" not in html
    pictures = re.findall(r"\]\((report/\w+\.png)\)", markdown)
    assert len(pictures) == 2
    for name in pictures:
        assert (tmp_path / "s" / name).read_bytes().startswith(b"\x89PNG")
    assert "nats a token" in markdown
    path = sweep.folder(sweep.groups[0]) / "result-test.json"
    rows = json.loads(path.read_text())
    path.write_text(json.dumps([row | {"loss": None} for row in rows]))
    reporting.write(sweep, sweep.collect(), 3)  # as of an earlier version's run
    assert "nats a token" not in (tmp_path / "s" / "report.md").read_text()
    identities = re.findall(r'\bid="([^"]+)"', html)
    assert len(identities) == len(set(identities))


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            {"decoding": {"temperature": 1.0}},
            r"otherwise than the rest .*: decoding.beam_size \(in the sweep 5, "
            r"in the file 'unset'\), .*; move it away, and sweep.py run scores",
        ),
        (
            {"checkpoint": "last"},
            r"checkpoint \(in the sweep 'best', in the file 'last'\)",
        ),
        ("{", "is damaged; move it away, and sweep.py run scores"),
        ("{}", "is damaged; move it away"),
        ("[]", "is damaged; move it away"),
        ("[1, 2]", "is damaged; move it away"),
    ],
)
def test_a_result_of_another_making_is_not_reported(
    tmp_path, corpus, split, change, sentence
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    assert "--beam_size=5" in eval_command(sweep, sweep.groups[0], ["test"])
    path = sweep.folder(sweep.groups[1]) / f"result-{split}.json"
    kept = path.read_text()
    if isinstance(change, dict):
        change = json.dumps([row | change for row in json.loads(kept)])
    path.write_text(change)
    rows = sweep.collect()
    status = {row["arm"]: row["status"] for row in rows}
    assert status == {"K=4": "done", "K=2": "failed", "K=1": "done"}
    (told,) = {row["error"] for row in rows} - {None}
    assert re.search(f"{path.name} .*{sentence}", told), told
    with pytest.raises(ValueError, match=f"{path} .*{sentence}"):
        reporting.write(sweep, rows, 1)
    assert path.read_text() == change and not (tmp_path / "s" / "report.md").exists()
    path.write_text(kept)
    reporting.write(sweep, sweep.collect(), 1)


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("score", ["bleu", "chrf", "exact_match"])
def test_a_result_without_a_score_is_damaged(tmp_path, corpus, split, score):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric="chrf"))
    for index in range(3):
        finish(sweep, index)
    path = sweep.folder(sweep.groups[1]) / f"result-{split}.json"
    kept = json.loads(path.read_text())
    lacking = {key: value for key, value in kept[1].items() if key != score}
    for row in (lacking, lacking | {score: None}, lacking | {score: "high"}):
        path.write_text(json.dumps([kept[0], row]))
        rows = sweep.collect()
        assert {row["arm"] for row in rows if row["status"] == "failed"} == {"K=2"}
        with pytest.raises(ValueError, match=f"^{path} is damaged; move it away"):
            reporting.write(sweep, rows, 1)


def test_a_search_waits_for_a_score_that_its_result_lacks(tmp_path, corpus):
    opened = options(tmp_path / "s", corpus, tune=[f"{RATE}=0.01,0.02"])
    sweep = open_sweep(opened)
    finish(sweep, 0, splits=("val",))
    path = sweep.folder(sweep.groups[0]) / "result-val.json"
    path.write_text(path.read_text().replace('"bleu"', '"blue"'))
    again = open_sweep(opened)
    assert all(trial.is_search for trial in again.plan.trials)
    told = {row["error"] for row in again.collect()} - {None}
    assert told == {
        f"{path} is damaged; move it away, and sweep.py run scores its group again."
    }


@pytest.mark.parametrize(
    "changes, config, sentence",
    [
        ({"test_split": "tset"}, {}, "tset"),
        ({"metric": "published_bleu"}, {}, "--metric=published_bleu is of multi30k"),
        ({}, {"data.name": "numbrs"}, "numbrs"),
        ({}, {RATE: 1e39}, "Arm K=4 can't be built: config.optimizer.learning_rate"),
        ({}, {"seed": 2**32 - 1}, "config.seed must be from 0 to below 4294967296"),
        ({}, {"optimizer.schedule": "cosin"}, "optimizer.schedule must be .* 'cosin'"),
    ],
)
def test_what_could_not_be_scored_or_trained_is_refused_at_first(
    tmp_path, corpus, changes, config, sentence
):
    opened = options(tmp_path / "s", corpus, **changes)
    opened.config.update_from_flattened_dict(config)
    with pytest.raises((ValueError, OSError), match=sentence):
        open_sweep(opened)
    assert not (tmp_path / "s").exists()


def test_a_damaged_record_of_a_group_is_named(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index, splits=("val", "test") if index < 2 else ())
    run, failed = (
        sweep.folder(sweep.groups[index]) / name
        for index, name in ((1, "run.json"), (2, "failed.json"))
    )
    kept = run.read_text()
    texts = [kept[:20], "{}", "[]", "3", "[" * 10**5]
    texts.append(json.dumps(json.loads(kept) | {"devices": "cpu"}))
    for text in texts:
        run.write_text(text)
        failed.write_text(text)
        rows = sweep.collect()
        status = {row["arm"]: row["status"] for row in rows}
        assert status == {"K=4": "done", "K=2": "failed", "K=1": "failed"}
        told = {row["arm"]: row["error"] for row in rows}
        assert told["K=2"].startswith(f"{run} is damaged; restore it, or move its")
        assert (
            told["K=1"] == f"{failed} is damaged; sweep.py run tries its group again."
        )
        with pytest.raises(ValueError, match=f"^{run} is damaged; restore it"):
            reporting.write(sweep, rows, 1)
    run.write_text(kept)
    reporting.write(sweep, sweep.collect(), 1)


def test_damaged_metrics_and_translations(tmp_path, corpus):
    """Lines of metrics that are none are passed over; translations are missed."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    folder = sweep.folder(sweep.groups[1])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'3\n[]\n{"step": "1"}\n{"step": 30}\n\xff\n' + b"[" * 10**5)
    rows = sweep.collect()
    assert {row["steps"] for row in rows} == {20}
    reporting.write(sweep, rows, 1)
    (folder / "test-1.txt").write_text("one\n")
    with pytest.raises(ValueError, match="test-1.txt holds 1 lines, not .* the 12"):
        reporting.write(sweep, rows, 1)


def test_a_trial_is_of_the_plans_arm_whatever_its_group_calls_it(tmp_path, corpus):
    """As a sweep of before a mend of how arms are named does."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    path = sweep.folder(sweep.groups[1]) / "group.json"
    path.write_text(path.read_text().replace('"arm": "K=2"', '"arm": "baseline"'))
    again = open_sweep(options(tmp_path / "s", corpus))
    assert [row["arm"] for row in again.collect()][::2] == ["K=4", "K=2", "K=1"]
    reporting.write(again, again.collect(), 1)


@pytest.mark.parametrize("name", ["sweep.json", "groups/*/group.json"])
@pytest.mark.parametrize("text", ["{", "{}", "[]", "3"])
def test_a_damaged_file_is_named(tmp_path, corpus, name, text):
    open_sweep(options(tmp_path / "s", corpus))
    path = sorted((tmp_path / "s").glob(name))[0]
    path.write_text(text)
    for verb in ("report", "run"):
        with pytest.raises(ValueError, match=f"^{path} is damaged .*; restore it, or"):
            open_sweep(options(tmp_path / "s", corpus, verb=verb))
    assert path.read_text() == text


def test_a_search_does_not_choose_by_a_result_of_another_making(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=[f"{RATE}=0.01,0.02"]))
    finish(sweep, 0, splits=("val",))
    path = sweep.folder(sweep.groups[0]) / "result-val.json"
    path.write_text(path.read_text().replace('"best"', '"last"'))
    assert all(trial.is_search for trial in sweep.extended().plan.trials)


def test_any_character_may_stand_in_a_translation(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index)
    odd = ["a\u0085b", "a\u2028b", "a\x0bb", "a\rb", *SENTENCES[4:-1], ""]
    path = sweep.folder(sweep.groups[1]) / "test-0.txt"
    path.write_text("".join(line + "\n" for line in odd))
    done = [row for row in sweep.collect() if row["status"] == "done"]
    found = reporting.texts(sweep, done)[0]
    assert found[sweep.groups[1].trials[0].id] == odd
    assert {len(lines) for lines in found.values()} == {len(SENTENCES)}


def test_losses_of_other_tokens_are_not_told(tmp_path, corpus):
    arms = tmp_path / "arms.py"
    function = '"""Scientific: KEY."""\n    return [{"KEY": n} for n in (20, 60)]\n'
    told = {}
    for name, key in (("same", "train.num_steps"), ("other", "data.vocab_size")):
        body = function.replace("KEY", key)
        arms.write_text(f"def sizes(base):\n    {body}")
        workdir = tmp_path / name
        opened = options(workdir, corpus, ablation=f"{arms}:sizes")
        sweep = open_sweep(opened)
        for index in range(len(sweep.groups)):
            finish(sweep, index)
        reporting.write(sweep, sweep.collect(), 1)
        told[name] = (workdir / "report.md").read_text()
    assert "nats a token" in told["same"] and "chrF" in told["same"]
    assert "nats a token" not in told["other"] and "chrF" in told["other"]


def test_every_arm_looks_different_and_a_matched_one_akin():
    names = [*"abcdefghijklmno", "a, equal parameters", "b, equal parameters"]
    found = looks([SimpleNamespace(arm=SimpleNamespace(name=n)) for n in names])
    assert len(set(found)) == len(names)
    colours = {name: look[0] for name, look in zip(names, found, strict=True)}
    assert colours["a"] == colours["a, equal parameters"] != colours["b"]


def test_a_call_ends_in_one_sentence(tmp_path):
    calls = {
        ("list", "--config=configs/base.py", "--ablation=haeds"): "did you mean heads",
        ("report", f"--workdir={tmp_path}"): "holds no sweep",
        ("status",): "--workdir is needed",
        ("list", "--config=configs/base.py"): "--ablation is needed, as in --ablation=",
        ("list", "--ablation=heads"): "--config is needed, as in --config=configs/num",
        ("run", "--resources=num_gpus=1"): "--resources says nothing of groups that",
        ("run", "--address=HOST:6379"): "--address says nothing of groups that run her",
        (
            *("run", "--resources=cores=1"),
            *("--coordinator=h:1", "--num_processes=2", "--process_id=0"),
        ): "--resources says nothing of groups that run here",
        ("sweep",): "one of list, run, status, report",
    }
    for call, sentence in calls.items():
        ran = subprocess.run(
            [sys.executable, "sweep.py", *call],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 2 and "Traceback" not in ran.stderr
        assert sentence in ran.stderr.strip().splitlines()[-1]


FULL_DISK = """
import runpy
import sys
from sweeps.runner import Runner
def process(self, *_):
    raise OSError(28, "No space left on device")
Runner.process = process
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_full_disk_ends_a_sweep_in_one_sentence(tmp_path, corpus):
    workdir = tmp_path / "s"
    open_sweep(options(workdir, corpus))
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "sweep.py", "run", f"--workdir={workdir}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stderr.splitlines()[-1] == (
        f"sweep.py: No space left on device. What is done in {workdir} is kept: mend "
        f"that, and the same command goes on."
    )


def test_who_reads_the_table_does_not_hold_up_the_sweep(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    sweep.collect()
    path = tmp_path / "s" / "sweep.sqlite"
    journal = tmp_path / "s" / "sweep.sqlite-journal"
    with contextlib.closing(sqlite3.connect(path)) as reader:
        rows = reader.execute("SELECT status FROM trials")
        assert rows.fetchone() == ("waiting",)
        finish(sweep, 0)
        sweep.collect()
        assert rows.fetchall() == [("waiting",)] * 5
    assert [row["status"] for row in table(tmp_path / "s")[:2]] == ["done"] * 2
    for file in (path, journal):
        file.write_bytes(b"of a disk that lost some" * 99)
    sweep.collect()
    assert len(table(tmp_path / "s")) == 6 and not journal.exists()


def runs(runner, program):
    """Let a runner start this Python program in place of train.py and eval.py."""
    started = []

    def start(command, **options):
        started.append(subprocess.Popen([sys.executable, "-c", program], **options))
        return started[-1]

    runner.start = start
    return started


def test_a_process_that_the_sweeps_signal_ended_too_has_not_failed(tmp_path, corpus):
    """Ctrl-C and the end of a job go to all processes, and eval.py does not save."""
    runner = Runner(open_sweep(options(tmp_path / "s", corpus)), None)
    started = runs(runner, "raise KeyboardInterrupt")
    start = runner.start

    def start_and_stop(command, **given):
        start(command, **given).wait()
        runner.stop = "SIGINT"
        return started[-1]

    runner.start = start_and_stop
    with pytest.raises(Stopped, match="SIGINT"):
        runner.run()
    assert len(started) == 1 and not list(tmp_path.glob("s/groups/*/failed.json"))


def test_what_was_stopped_is_not_trained_whatever_is_said_after(tmp_path, corpus):
    runner = Runner(open_sweep(options(tmp_path / "s", corpus)), None)
    saved = "SIGTERM: saved step 3; the same command goes on from there."
    runs(runner, f"print({saved!r}); print('A library says goodbye.')")
    with pytest.raises(Stopped, match="A training process was told to stop"):
        runner.run()
    assert not list(tmp_path.glob(f"s/groups/*/{TRAINED}"))


@pytest.mark.parametrize("now, told", [("c0ffee", False), ("decade", True)])
def test_trials_of_other_code_than_the_rest_are_told(
    tmp_path, corpus, monkeypatch, capsys, now, told
):
    monkeypatch.setattr("headcount.sweeps.runner.commit", lambda: now)
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish(sweep, 0)
    runner = Runner(sweep, sweep.groups[1:2])
    runs(runner, "")
    runner.run()
    said = "trials are of decade, those so far of c0ffee"
    assert (said in capsys.readouterr().err) == told


def test_a_group_is_tried_again_whatever_the_clock_says(tmp_path, corpus):
    """It was set back since, or is another machine's."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    failed = sweep.folder(sweep.groups[0]) / "failed.json"
    failed.write_text(json.dumps({"error": "no memory"}))
    os.utime(failed, (time.time() + 3600,) * 2)
    runner = Runner(sweep, sweep.groups[:1])
    started = runs(runner, "")
    runner.run()
    assert started and not failed.exists()
    runner = Runner(sweep, sweep.groups[:1])
    started = runs(runner, "")
    failed.write_text(json.dumps({"error": "no memory"}))  # another process's, just now
    runner.run()
    assert not started and failed.exists()


def test_groups_that_take_cores_run_at_once_each_on_its_own(tmp_path, corpus):
    there = sorted(os.sched_getaffinity(0))
    workers = workers_here(1)
    assert sorted(core for worker in workers for core in worker.cores) == there
    assert len(workers) == len(there)
    sweep = open_sweep(options(tmp_path / "s", corpus))
    assert len(sweep.groups) > 1  # one waits until another has begun too
    begun, cores = tmp_path / "begun", tmp_path / "cores"
    begun.mkdir(), cores.mkdir()
    at_once = min(2, len(workers))
    program = f"""
import os, time
from pathlib import Path
open({str(begun)!r} + f"/{{os.getpid()}}", "w").close()
while len(list(Path({str(begun)!r}).iterdir())) < {at_once}:
    time.sleep(0.01)
open({str(cores)!r} + f"/{{os.getpid()}}", "w").write(repr(os.sched_getaffinity(0)))
"""
    runner = Runner(sweep, None, workers[:2])
    runs(runner, program)
    runner.run()
    used = {path.read_text() for path in cores.iterdir()}
    assert used == {repr(worker.cores) for worker in workers[:2]}
    assert sorted(os.sched_getaffinity(0)) == there  # the sweep's own are as before


@pytest.mark.parametrize("cores", [0, 10_000, 1.5, "two"])
def test_a_group_can_take_no_more_cores_than_there_are(cores):
    with pytest.raises(ValueError, match=f"cores must be from 1 to .*got {cores}"):
        workers_here(cores)


def test_a_group_takes_a_gpu_or_cores(monkeypatch):
    monkeypatch.setattr(
        "headcount.sweeps.runner.devices", lambda: [{"CUDA_VISIBLE_DEVICES": 0}]
    )
    assert len(workers_here()) == 1
    with pytest.raises(ValueError, match="without GPUs; with JAX_PLATFORMS=cpu"):
        workers_here(1)


def test_an_error_of_the_sweep_ends_what_it_has_started(tmp_path, corpus):
    runner = Runner(open_sweep(options(tmp_path / "s", corpus)), None)
    started = runs(runner, "import time; time.sleep(60)")

    def watch(threads):
        while not started:
            time.sleep(0.01)
        raise BrokenPipeError

    runner.watch = watch
    try:
        with pytest.raises(BrokenPipeError):
            runner.run()
        assert [child.poll() for child in started] == [-signal.SIGTERM]
    finally:
        runner.stop = "the test"
        started[0].kill()


def test_jobs_of_slurm_know_a_relative_workdir(tmp_path, corpus, monkeypatch):
    submitted = []

    class Executor:
        """Stands for submitit's."""

        def __init__(self, folder, cluster):
            assert folder == tmp_path / "s" / "slurm"

        def update_parameters(self, **parameters):
            pass

        def batch(self):
            return contextlib.nullcontext()

        def submit(self, job):
            submitted.append(job.command)
            return SimpleNamespace(job_id=1, wait=int, exception=lambda: None)

    submitit = SimpleNamespace(AutoExecutor=Executor)
    monkeypatch.setattr(launchers, "package", lambda name: submitit)
    monkeypatch.chdir(tmp_path)
    sweep = open_sweep(options(Path("s"), corpus))
    rows = launchers.slurm(sweep, sweep.groups[:1], "local", [])
    assert f"--workdir={tmp_path / 's'}" in submitted[0] and len(rows) == 6


@pytest.mark.parametrize(
    "launcher, pair, error",
    [
        ("ray", "nmu_gpus=1", ValueError("Invalid option\nkeyword nmu_gpus")),
        ("ray", "num_gpus=one", TypeError("The type of keyword 'num_gpus' must be")),
        ("slurm", "partition=gpu", NameError("Unknown argument 'partition'")),
        ("slurm", "timeout_min=10h", AssertionError()),
    ],
)
def test_resources_that_a_launcher_does_not_take_are_named(
    tmp_path, corpus, monkeypatch, capsys, launcher, pair, error
):
    def refuse(**parameters):
        assert pair.split("=")[0] in parameters
        raise error

    executor = SimpleNamespace(update_parameters=refuse)
    module = SimpleNamespace(  # stands for ray and for submitit
        init=lambda **_: None,
        nodes=lambda: [],
        remote=refuse,
        AutoExecutor=lambda *_, **__: executor,
    )
    monkeypatch.setattr(launchers, "package", lambda name: module)
    monkeypatch.setattr(launchers, "requirements", lambda engine: {"num_cpus": 1})
    sweep = open_sweep(options(tmp_path / "s", corpus))
    address = {"ray": None, "slurm": "local"}[launcher]
    with pytest.raises(SystemExit) as left:
        launchers.LAUNCHERS[launcher](sweep, None, address, [pair])
    whose = {"ray": "Ray", "slurm": "submitit"}[launcher]
    told = " ".join(str(error).split()) or "AssertionError"
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"--resources={pair}: {whose} does not take that: {told}")
    assert left.value.code == 2


def test_a_follower_that_waits_for_a_process_of_before_heeds_signals(tmp_path):
    where = pod.Place(tmp_path / "leader", tmp_path / "order.json")
    order = {"what": "run", "number": 1, "name": "nothing.py", "flags": []}
    write_json(where.order, order)
    numbers = signal.SIGTERM, signal.SIGINT
    before = {number: signal.getsignal(number) for number in numbers}
    with locked(where.leader), locked(tmp_path / "claim") as held:
        begun = time.monotonic()
        timers = [
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)),
            threading.Timer(8.0, held.close),
        ]
        for timer in timers:
            timer.start()
        try:
            with pytest.raises(Stopped, match="SIGTERM"):
                pod.follow(where, tmp_path / "claim", [])
        finally:
            for timer in timers:
                timer.cancel()
            for number, handler in before.items():
                signal.signal(number, handler)
        assert time.monotonic() - begun < 5


CALIBRATION = """
import json, pathlib, sys
(folder,) = [x.split("=", 1)[1] for x in sys.argv if x.startswith("--workdir=")]
with open(pathlib.Path(folder) / "metrics.jsonl", "w") as file:
    for row in ROWS:
        file.write(json.dumps({"step": 4, "trial": 0} | row) + "\\n")
print("It has ended.", file=sys.stderr)
"""


def test_a_run_of_few_steps_is_timed_or_said_to_be_too_short(
    tmp_path, corpus, monkeypatch
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    pace, dev = {"steps_per_second": 2.0}, {"dev_bleu": 1.0}

    def of(rows):
        program = CALIBRATION.replace("ROWS", str(rows))
        command = [sys.executable, "-c", program, "--workdir=x"]
        monkeypatch.setattr(show, "train_command", lambda sweep, group: command)
        return show.expected_seconds(sweep)

    whole, *fewer = (arm.training_flops for arm in sweep.plan.arms)
    share = sum(fewer) / whole  # two arms of fewer keys and values
    assert 1.5 < share < 2 and sweep.groups[0].trials[0].arm == "K=4"
    wanted = 20 / 2.0 * (1 + share)  # 20 steps of an arm's seeds, which are one group
    assert of([{"loss": 3.0}, pace, dev]) == pytest.approx(wanted)
    with pytest.raises(
        ValueError, match=r"It has ended. \(--nocalibrate leaves it out"
    ):
        of([{"loss": 3.0}, dev])


def test_of_sweeps_that_begin_at_once_one_has_the_workdir(
    tmp_path, corpus, monkeypatch
):
    check_data = opening.check_data

    def meanwhile(settings):
        monkeypatch.setattr(opening, "check_data", check_data)
        open_sweep(options(tmp_path / "s", corpus, checkpoint="last"))

    monkeypatch.setattr(opening, "check_data", meanwhile)
    with pytest.raises(ValueError, match=r"holds another sweep: checkpoint \(there"):
        open_sweep(options(tmp_path / "s", corpus))
    there = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert there["checkpoint"] == "last"
