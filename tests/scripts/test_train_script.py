"""train.py: what a run writes, how it resumes, and when it leaves a workdir alone."""

import json
import random
import shlex
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from headcount.configs import run as config_of_run
from headcount.data import tokenizers
from headcount.runtime.files import locked
from headcount.tasks.translation import METRICS
from headcount.training.run import load
from headcount.training.selection import ranks
from tests.runs import (
    arguments,
    checksums,
    fails,
    logged,
    read,
    run,
    start,
    status,
    succeed,
    training,
    write_corpus,
)


def wait_for_step(process, workdir, step):
    """Wait until a step is logged, or the process has ended."""
    while process.poll() is None:
        if (workdir / "metrics.jsonl").exists():
            text = (workdir / "metrics.jsonl").read_text()
            if f'"step": {step},' in text:
                return
        time.sleep(0.005)


def test_step_is_compiled_once_and_before_the_first_batch(trained):
    log = (trained / "log.txt").read_text()
    assert log.count("XLA compilation of jit(train_steps)") == 1
    assert log.index("XLA compilation of jit(train") < log.index("First step")


@pytest.mark.slow
def test_resume_after_a_signal_is_bit_identical(trained, corpus, tmp_path):
    """Stopped at a random moment, with the same metrics as uninterrupted.

    tests/faults has other signals and kills, and several of them.
    """
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    process = start(training(workdir, **corpus))
    wait_for_step(process, workdir, generator.randrange(1, 25))
    time.sleep(generator.uniform(0, 0.05))
    process.send_signal(signal.SIGTERM)
    log = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + signal.SIGTERM, log
    assert status(workdir) == "stopped"
    succeed(training(workdir, **corpus))
    assert status(workdir) == "finished"
    assert checksums(workdir) == checksums(trained), f"random seed {seed}"
    compared = ("step", "trial", "loss", "gradient_norm", "learning_rate", "dev_loss")
    for ours, theirs in zip(logged(workdir), logged(trained), strict=True):
        for name in compared:
            assert ours.get(name) == theirs.get(name), f"random seed {seed}"


COUNT_STEPS = """
import contextlib
from headcount.training import loop, metrics

steps = {"started": 0, "read": 0}
train_steps, add, paused = loop.train_steps, metrics.Window.add, metrics.Window.paused

def count_started(state, trials, batches, number, **static):
    steps["started"] += number
    return train_steps(state, trials, batches, number, **static)

def count_read(window, metrics):
    steps["read"] += 1
    return add(window, metrics)

@contextlib.contextmanager
def print_counts(window):
    print(steps["started"], steps["read"])
    with paused(window):
        yield

loop.train_steps = count_started
metrics.Window.add, metrics.Window.paused = count_read, print_counts
"""


@pytest.mark.slow
def test_pending_steps_finish_before_a_pause_of_the_clock(corpus, tmp_path):
    """Otherwise their tokens would count, and their time would not."""
    steps = {"train.num_steps": 12, "train.log_every_steps": 12}
    steps |= {"train.eval_every_steps": 5, "train.checkpoint_every_steps": 7}
    args = training(tmp_path / "run", **corpus | steps)
    ran = succeed([*args, "--profile=2:1"], before=COUNT_STEPS)
    pauses = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert {2, 3, 5, 7, 10, 12} <= {started for started, _ in pauses}
    assert all(read == started for started, read in pauses)


def test_a_run_writes_config_trials_facts_metrics_and_tensorboard(trained):
    assert read(trained, "config.json")["model"]["width"] == 16
    assert read(trained, "trials.json") == [{"seed": 0}, {"seed": 1}]
    record = read(trained, "run.json")
    assert record["format_version"] == 1 and record["status"] == "finished"
    assert record["attention"].keys() == {"encoder", "decoder", "cross"}
    assert record["num_parameters"] > 1000 and record["versions"]["jax"]
    assert record["task"]["name"] == "translation"
    assert record["started"]
    assert list(trained.glob("events.*")) and (trained / "tokenizer").is_dir()
    first, *_, last = logged(trained)
    assert first["step"] == 1 and last["step"] == 60 and "dev_bleu" in last
    assert all(row["target_fill"] > 0.9 for row in logged(trained) if "loss" in row)


def test_each_trial_has_a_data_order_of_its_own(trained):
    fills = [row["source_fill"] for row in logged(trained) if "loss" in row]
    first, second = np.reshape(fills, (60, 2)).T
    assert (first != second).any()


PRINT_BEST = """
import json, os
from headcount.training import loop

def fit(trainer, *_):
    found = [trainer.best[name].tolist() for name in ("step", "score")]
    print(json.dumps([trainer.step, *found]), flush=True)
    os._exit(0)

loop.fit = fit
"""


def test_a_resumed_run_knows_its_best_parameters(workdir, corpus):
    """Otherwise the next evaluation would be the best, however bad."""
    args = training(workdir, **corpus | {"train.num_steps": 80})
    step, steps, scores = json.loads(succeed(args, before=PRINT_BEST).stdout)
    dev = {row["trial"]: row for row in logged(workdir) if "dev_loss" in row}
    rows = {
        trial: {name: row[f"dev_{name}"] for name in ("exact_match", "loss")}
        for trial, row in dev.items()
    }
    wanted = ranks(rows, METRICS["exact_match"], 2).tolist()  # of configs/numbers.py
    assert (step, steps, scores) == (60, [60, 60], wanted)


def test_a_finished_run_stays_as_it_is(workdir, corpus):
    path = workdir / "run.json"  # of another machine
    path.write_text(json.dumps(read(workdir, "run.json") | {"commit": "x", "cores": 7}))
    before = checksums(workdir), read(workdir, "run.json")
    ran = succeed(training(workdir, **corpus))
    assert "is trained already: 60 of 60" in ran.stderr
    assert "without an evaluation" not in ran.stderr
    assert "bit-identical" not in ran.stderr
    assert (checksums(workdir), read(workdir, "run.json")) == before


@pytest.mark.parametrize("status", ["finished", "stopped", "running"])
def test_a_run_that_lost_its_checkpoints_does_not_start_over(workdir, status, corpus):
    """Unless it was killed, maybe before the first one."""
    shutil.rmtree(workdir / "checkpoints")
    path = workdir / "run.json"
    path.write_text(json.dumps(read(workdir, "run.json") | {"status": status}))
    before = logged(workdir)
    args = training(workdir, **corpus, **{"train.num_steps": 2})
    if status == "running":
        succeed(args)
    else:
        fails(run(args), workdir / "checkpoints", status)
        assert logged(workdir) == before


@pytest.mark.slow
def test_num_steps_lowered_to_a_stop_says_that_it_was_not_evaluated(workdir, corpus):
    shutil.rmtree(workdir / "checkpoints" / "60")
    ran = succeed(training(workdir, **corpus | {"train.num_steps": 56}))
    assert "is trained already: 56 of 56" in ran.stderr
    assert "Step 56 was saved without an evaluation" in ran.stderr
    fails(run(arguments("eval.py", workdir=workdir, split="val")), "--checkpoint=last")


@pytest.mark.parametrize(
    "change, culprits",
    [
        ({"model.width": 32}, ["model.width (there 16, now 32)"]),
        ({"data.directory": "other"}, ["training data changed", "2000 examples there"]),
        ({"data.directory": "dev"}, ["dev data changed"]),
        ({"train.num_steps": 30}, ["60 steps already", "train.num_steps=30"]),
    ],
)
def test_a_run_does_not_resume_as_another(trained, corpus, tmp_path, change, culprits):
    """Another config, other data, or fewer steps than it has."""
    if change.get("data.directory") == "other":
        change = write_corpus(tmp_path / "other", ["a dog"] * 9, ["ein Hund"] * 9)
    elif "data.directory" in change:
        shutil.copytree(corpus["data.directory"], tmp_path / "dev")
        (tmp_path / "dev" / "val.de").write_text("ein Hund\n" * 200)
        change = {"data.directory": tmp_path / "dev"}
    before = {path: path.read_bytes() for path in trained.glob("*.json")}
    fails(run(training(trained, **corpus | change)), *culprits)
    assert {path: path.read_bytes() for path in trained.glob("*.json")} == before


@pytest.mark.slow
def test_a_start_without_its_data_leaves_nothing(corpus, tmp_path):
    """Also where the training split is there, and its vocabulary was made."""
    folder = shutil.copytree(corpus["data.directory"], tmp_path / "corpus")
    overrides = corpus | {"data.directory": folder}
    for split in ("val", "train"):
        (folder / f"{split}.de").unlink()
        fails(run(training(tmp_path / "run", **overrides)), f"{split}.de")
        assert list(tmp_path.iterdir()) == [folder]
    (tmp_path / "run").mkdir()
    fails(run(training(tmp_path / "run", **overrides)), "train.de")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_dry_run_has_no_steps_to_profile(tmp_path):
    args = [*training(tmp_path), "--dry_run=v5e:1x1", "--profile=0:1"]
    fails(run(args), "--profile", "--dry_run")


@pytest.mark.slow
def test_a_failed_start_does_not_claim_the_workdir(corpus, tmp_path):
    """Nor keep its vocabulary, which is of another config."""
    workdir = tmp_path / "run"
    parts = {"train.accumulate_steps": 1000, "data.vocab_size": 60}
    fails(run(training(workdir, **corpus | parts)), "train.accumulate_steps")
    (workdir / "tokenizer" / "my.model").write_text("precious")
    assert tokenizers.load_pair(workdir / "tokenizer")[0].vocab_size == 60
    short = {"train.num_steps": 2, "train.eval_every_steps": 2}
    succeed(training(workdir, **corpus | short))
    assert tokenizers.load_pair(workdir / "tokenizer")[0].vocab_size == 80
    assert (workdir / "tokenizer" / "my.model").exists()
    fails(run(training(workdir, **corpus, seed=1)), "seed (there 0, now 1)")


@pytest.mark.slow
def test_a_failed_start_does_not_keep_the_vocabulary_of_a_mended_corpus(tmp_path):
    workdir, folder = tmp_path / "run", tmp_path / "corpus"
    overrides = write_corpus(folder, ["cat " * 999] * 9, ["Katze"] * 9)
    overrides |= {"train.num_steps": 2, "train.eval_every_steps": 2}
    fails(run(training(workdir, **overrides)), "no training example is left")
    write_corpus(folder, ["dog"] * 9, ["Hund"] * 9)
    succeed(training(workdir, **overrides))
    tokenizer = tokenizers.load_pair(workdir / "tokenizer")[0]
    assert tokenizer.decode(tokenizer.encode(["dog Hund"])[0]) == "dog Hund"


def test_documents_that_are_not_utf8_fail_with_file_and_offset(tmp_path):
    (tmp_path / "train.txt").write_bytes(b"to be \xff or not")
    changes = {"task.name": "language_model", "model.num_encoder_layers": 0}
    changes |= {"data.name": "text", "data.directory": str(tmp_path)}
    ran = run(training(tmp_path / "run", config="configs/base.py", **changes))
    fails(ran, "train.txt", "byte 6")


def test_a_folder_of_another_program_is_left_as_it_is(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    files = {
        tmp_path / "config.json": '{"model_type": "bert"}',
        tmp_path / "tokenizer" / "my.model": "precious",
    }
    for path, text in files.items():
        path.write_text(text)
    fails(run(training(tmp_path)), "config.json is not a file that train.py writes")
    there = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == files


def test_the_workdir_of_a_sweep_is_named_and_left_as_it_is(tmp_path):
    (tmp_path / "sweep.json").write_text("{}")
    fails(run(training(tmp_path)), "holds a sweep; choose another --workdir")
    assert [path.name for path in tmp_path.iterdir()] == ["sweep.json"]


def test_two_processes_do_not_share_a_workdir(corpus, tmp_path):
    (workdir := tmp_path / "run").mkdir()
    with locked(workdir / ".lock"):  # as a process that trains does
        ran = run(training(workdir, **corpus))
    fails(ran, "Another process is training in", workdir)


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
TRACKER_FAILS = """
from headcount.training import tracking
def close(self):
    raise OSError("no space for the tracker either")
tracking.TensorBoard.close = close
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_intact(workdir, trained, corpus):
    """Files that can't grow past a limit are to the writer the same as a full disk."""
    longer = training(workdir, **corpus, **{"train.num_steps": 80})
    metrics = (workdir / "metrics.jsonl").stat().st_size
    ran = run(longer, before=LIMIT.format(metrics + 999) + TRACKER_FAILS)
    fails(ran, "metrics.jsonl can't be written")  # the last line, although
    assert "no space for the tracker either" in ran.stderr
    assert status(workdir) == "failed"
    assert checksums(workdir) == checksums(trained)
    (workdir / "metrics.jsonl").write_text("")  # leaves only the checkpoint too large
    ran = run(longer, before=LIMIT.format(12_000))
    fails(ran, "could not be written", "step 60 is intact")
    assert status(workdir) == "failed"
    assert checksums(workdir) == checksums(trained)
    succeed(longer)
    assert status(workdir) == "finished"


TEN_PAIRS = {
    "a brown dog runs over the green field": "ein brauner Hund rennt über das Feld",
    "two children play in the white sand": "zwei Kinder spielen im weißen Sand",
    "a man in a red shirt rides a bike": "ein Mann im roten Hemd fährt Fahrrad",
    "the old woman sits on a wooden bench": "die alte Frau sitzt auf einer Holzbank",
    "people walk down a busy street at night": "Leute gehen nachts eine Straße entlang",
    "a girl holds a yellow balloon": "ein Mädchen hält einen gelben Luftballon",
    "three boys jump into the cold lake": "drei Jungen springen in den kalten See",
    "a chef cooks soup in a large pot": "ein Koch kocht Suppe in einem großen Topf",
    "a bird flies over the blue sea": "ein Vogel fliegt über das blaue Meer",
    "the band plays music on a small stage": "die Band spielt Musik auf einer Bühne",
}
MEMORIZING = {
    "seeds": 1,
    "data.vocab_size": 200,
    "data.batch_tokens": 256,
    "data.max_decode_length": 64,
    "model.width": 64,
    "model.mlp_dim": 64,
    "model.dropout": 0.0,
    "optimizer.label_smoothing": 0.0,
    "optimizer.learning_rate": 0.003,
    "optimizer.warmup_steps": 30,
    "train.num_steps": 250,
    "train.log_every_steps": 50,
    "train.eval_every_steps": 250,
    "train.checkpoint_every_steps": 250,
}


@pytest.mark.slow
def test_ten_pairs_are_memorized_and_translated(tmp_path):
    """With two vocabularies, so that taking one for the other is noticed."""
    apart = {"data.joint_vocabulary": False, "data.vocab_size": 120}
    pairs = write_corpus(tmp_path / "corpus", TEN_PAIRS, TEN_PAIRS.values())
    workdir = tmp_path / "a run"
    ran = succeed(training(workdir, **pairs | MEMORIZING | apart))
    hint = ran.stderr.splitlines()[-1].partition("python ")[2]
    assert shlex.split(hint) == ["eval.py", f"--workdir={workdir}", "--split=val"]
    ran = succeed(
        arguments("eval.py", workdir=workdir, split="val", beam_size=2, show=1)
    )
    (row,) = read(workdir, "result-val.json")
    assert row["trial"] == row["seed"] == 0 and row["diverged_at"] is None
    dev = logged(workdir)[-1]
    assert row["bleu"] > 95 and dev["dev_bleu"] > 95
    assert row["loss"] == pytest.approx(dev["dev_loss"], rel=1e-4)
    assert row["signatures"]["bleu"].startswith("nrefs:1|")
    assert row["options"]["beam_size"] == 2 and row["examples"] == 10
    assert next(iter(TEN_PAIRS)) in ran.stdout

    first, second = list(TEN_PAIRS.items())[:2]
    lines = f"{first[0]}\n\n  \n{second[0]}"  # the last line does not end
    ran = succeed(arguments("predict.py", workdir=workdir), stdin=lines.encode())
    assert ran.stdout.split("\n") == [first[1], "", "", second[1], ""]


@pytest.mark.slow
def test_init_from_starts_from_the_best_parameters_of_another_run(trained, initialized):
    log = (initialized / "log.txt").read_text()
    assert "model.dropout (there 0.1, now 0.3)" in log
    assert "Starting from" in log and "step 60, 60" in log
    ours, theirs = load(initialized, "last"), load(trained, "best")
    vocabularies = [run.task.tokenizers[0].vocabulary for run in (ours, theirs)]
    assert vocabularies[0] == vocabularies[1]
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


@pytest.mark.parametrize(
    "changes, culprit",
    [
        ({"seeds": 3}, "has 2 trials and this run has 3"),
        ({"model.mlp_dim": 24}, "model.mlp_dim (there 16, now 24)"),
        ({"train.init_from": "nowhere"}, "train.init_from=nowhere"),
        ({"train.init_from": ""}, "train.init_from= holds no run"),
    ],
)
def test_init_from_a_run_that_does_not_fit(trained, corpus, tmp_path, changes, culprit):
    given = corpus | {"train.init_from": trained} | changes
    fails(run(training(tmp_path / "run", **given)), culprit)


def test_init_from_a_run_without_its_vocabulary(workdir, corpus, tmp_path):
    """Its parameters mean nothing with another one."""
    shutil.rmtree(workdir / "tokenizer")
    given = corpus | {"train.init_from": workdir}
    fails(run(training(tmp_path / "new", **given)), workdir / "tokenizer")


@pytest.mark.slow
def test_dev_is_scored_without_the_heads_that_gates_remove(trained, initialized):
    (first, second), (whole, gated) = (
        [row["dev_loss"] for row in logged(workdir) if "dev_loss" in row][-2:]
        for workdir in (trained, initialized)
    )
    assert whole == pytest.approx(first, rel=1e-5)
    assert abs(gated - second) > 1e-3


@pytest.mark.slow
def test_patience_counts_evaluations(initialized):
    """None is better than the first, at step 2."""
    found = [row["stopped_at"] for row in logged(initialized) if "stopped_at" in row]
    assert found == [6, 6]
    assert load(initialized, "last").step == [6, 6]
    assert load(initialized, "best").step == [2, 2]


def test_config_of_another_run(trained, tmp_path):
    there = read(trained, "config.json")
    assert config_of_run.get_config(str(trained)).to_dict() == there
    (tmp_path / "config.json").write_text(json.dumps(there | {"modle": 3}))
    for folder, culprit in ((tmp_path, "modle"), (tmp_path / "x", "config.json")):
        args = arguments("train.py", config=f"configs/run.py:{folder}", workdir="w")
        fails(run(args), culprit, folder)


def test_help_lists_flags_and_points_to_the_config_keys():
    for script in ("train.py", "eval.py", "predict.py"):
        ran = run([script, "--help"])
        assert ran.returncode == 0, ran.stderr
        everyday, _, others = ran.stdout.partition("Flags of runs of several proc")
        assert "\n  --workdir: " in everyday
        assert "orbax" not in ran.stdout and "helpfull" not in ran.stdout
        assert "\n  --coordinator: " not in everyday
        assert ("\n  --coordinator: " in others) == (script != "predict.py")
        assert ("configs/base.py, which says" in others) == (script == "train.py")
        assert ("\n  --directory: " in everyday) == (script == "eval.py")


@pytest.mark.slow
def test_scripts_run_as_plain_programs():
    """The tests above fork a process that has imported everything before."""
    process = start(["eval.py"])
    assert process.communicate()[1].startswith("eval.py: --workdir")
    assert process.returncode == 2
