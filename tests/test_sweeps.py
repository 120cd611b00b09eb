"""Sweeps without training: what is opened, kept on disk, selected and reported."""

import csv
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import base
from sweeps import reporting
from sweeps.opening import Options, chosen, open_sweep
from sweeps.runner import Runner, Sweep, train_command
from sweeps.store import TRAINED, locked

ROOT = Path(__file__).resolve().parent.parent
RATE = "optimizer.learning_rate"
SENTENCES = [f"the dog number {i} sleeps in the sun" for i in range(12)]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for split in ("train", "val", "test"):
        for language in ("en", "de"):
            text = "".join(f"{s}\n" for s in SENTENCES)
            (folder / f"{split}.{language}").write_text(text)
    return folder


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
        "checkpoint": "best",
        "metric": None,
        "test_split": None,
        "group_size": 16,
        "note": None,
        "is_new": True,
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
            row |= {"signature": "nrefs:1", "decoding": {"beam_size": 5}}
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
        ({"ablation": "haeds"}, "no ablation 'haeds' .* did you mean heads"),
        ({"ablation": "none.py:x"}, "no file none.py"),
        ({"seeds": 0}, "The sweep is empty: it has 3 arms and 0 seeds"),
        ({"metric": "rouge"}, "--metric must be one of bleu, .* 'rouge'"),
        ({"ablation": None}, "holds no sweep; --config and --ablation are needed"),
        (
            {"config": None, "is_new": False},
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


def test_groups_and_shards_are_chosen():
    assert chosen(5, None, None) == [0, 1, 2, 3, 4]
    assert chosen(5, 3, None) == [3]
    assert chosen(5, None, "1/3") == [1, 4]
    for group, shard in ((5, None), (None, "3/3"), (None, "one")):
        with pytest.raises(ValueError, match=str(group or shard)):
            chosen(5, group, shard)


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


def test_dev_selects_and_test_is_not_looked_at(tmp_path, corpus):
    tune = [f"{RATE}=0.01,0.02"]
    sweep = open_sweep(options(tmp_path / "s", corpus, tune=tune, group_size=2))
    first = [g for g in sweep.groups if g.trials[0].arm == "K=4"]
    finish(sweep, sweep.groups.index(first[0]), splits=("val",))
    rows = [row for row in sweep.collect() if row["arm"] == "K=4"]
    assert {row["selected"] for row in rows} == {None}  # the others are still to come
    runner = Runner(sweep, [0])
    assert runner.selected(first[0]) is None
    finish(sweep, sweep.groups.index(first[1]), splits=("val",))
    rows = [row for row in sweep.collect() if row["arm"] == "K=4"]
    chosen_rates = {json.loads(r["nuisance"])[RATE] for r in rows if r["selected"]}
    assert chosen_rates == {0.02}  # `finish` gives it the higher scores
    assert {r["status"] for r in rows if not r["selected"]} == {"done"}


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


def test_a_report_holds_what_was_computed(tmp_path, corpus, capsys):
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
    assert "A &lt;shared&gt; machine." in html and html.count("<svg") == 2
    outside = re.findall(r'(?:src|href)="(?!#)[^"]*"|url\(http[^)]*\)|@import', html)
    assert not outside and "<script" not in html
    pictures = re.findall(r"\]\((report/\w+\.png)\)", markdown)
    assert len(pictures) == 2
    for name in pictures:
        assert (tmp_path / "s" / name).read_bytes().startswith(b"\x89PNG")
    identities = re.findall(r'\bid="([^"]+)"', html)
    assert len(identities) == len(set(identities))


def test_a_call_ends_in_one_sentence(tmp_path, corpus):
    calls = {
        ("list", "--config=configs/base.py", "--ablation=haeds"): "did you mean heads",
        ("report", f"--workdir={tmp_path}"): "holds no sweep",
        ("status",): "--workdir is needed",
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
