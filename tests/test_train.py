"""train.py and eval.py as their users run them: real processes, real signals."""

import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver

from data import numbers
from sweeps.store import locked
from training.checkpoint import Checkpoints
from training.workdir import check_data

ROOT = Path(__file__).resolve().parent.parent
SMALL = {
    "data.vocab_size": 80,
    "data.batch_tokens": 512,
    "model.width": 16,
    "model.mlp_dim": 16,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "model.attention.num_heads": 2,
    "optimizer.warmup_steps": 10,
    "train.num_steps": 60,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 60,
    "train.checkpoint_every_steps": 7,
    "seeds": 2,
}


def command(script, **options):
    return [sys.executable, script, *[f"--{k}={v}" for k, v in options.items()]]


def train_command(workdir, config="configs/numbers.py", **overrides):
    settings = {f"config.{key}": value for key, value in (SMALL | overrides).items()}
    return command("train.py", config=config, workdir=workdir, **settings)


def run(args, **options):
    return subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=300, **options
    )


def refused(ran, *parts):
    """The run ended with one sentence that holds these parts, and exit code 2."""
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    sentence = ran.stderr.strip().splitlines()[-1]
    for part in parts:
        assert part in sentence
    return sentence


def final(workdir, step=60):
    """The checksums of all that the last checkpoint holds."""
    path = workdir / "checkpoints" / str(step) / "checksums" / "metadata"
    return json.loads(path.read_text())


def rows(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_corpus(folder, source, target, held_out=None):
    """Its val is the beginning of its train."""
    folder.mkdir(exist_ok=True)
    for language, texts in (("en", source), ("de", target)):
        lines = [f"{text}\n" for text in texts]
        (folder / f"train.{language}").write_text("".join(lines))
        (folder / f"val.{language}").write_text("".join(lines[:held_out]))
    return {"data.name": "text", "data.directory": folder}


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
    """The folder that all workers of this session of tests have."""
    own = tmp_path_factory.getbasetemp()
    return own if worker_id == "master" else own.parent


@pytest.fixture(scope="session")
def little(shared):
    """Overrides of a corpus that is read and translated in no time."""
    with locked(shared / "little.lock"):
        if not (shared / "little").exists():
            texts = (numbers.phrases(range(2000), name) for name in ("en", "de"))
            write_corpus(shared / "little", *texts, held_out=200)
    return {"data.name": "text", "data.directory": shared / "little"}


@pytest.fixture(scope="session")
def trained(shared, little, tmp_path_factory):
    """The workdir of an undisturbed run of two trials: a copy, each worker's own."""
    first = shared / "trained"
    with locked(shared / "trained.lock"):
        if not (first / "checkpoints" / "60").exists():
            ran = run(train_command(first, **little))
            assert ran.returncode == 0, ran.stderr
    return shutil.copytree(first, tmp_path_factory.mktemp("trained") / "run")


def wait_for_step(process, workdir, step):
    while process.poll() is None:
        if (workdir / "metrics.jsonl").exists():
            text = (workdir / "metrics.jsonl").read_text()
            if f'"step": {step},' in text:
                return
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_ends_as_an_undisturbed_one(trained, little, tmp_path, number):
    """Stopped at random moments, started again: the same bits, the same metrics."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    for step in (generator.randrange(1, 25), generator.randrange(25, 55)):
        process = subprocess.Popen(
            train_command(workdir, **little),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for_step(process, workdir, step)
        time.sleep(generator.uniform(0, 0.05))
        process.send_signal(number)
        said = process.communicate(timeout=120)[1]
        if number == signal.SIGTERM:
            assert process.returncode == 0, said
            assert "SIGTERM: saved step" in said
    ran = run(train_command(workdir, **little))
    assert ran.returncode == 0, ran.stderr
    assert final(workdir) == final(trained), f"random seed {seed}"
    compared = ("step", "trial", "loss", "gradient_norm", "learning_rate", "dev_loss")
    for ours, theirs in zip(rows(workdir), rows(trained), strict=True):
        for name in compared:
            assert ours.get(name) == theirs.get(name), f"random seed {seed}"


def test_what_a_run_leaves(trained):
    assert json.loads((trained / "config.json").read_text())["model"]["width"] == 16
    assert json.loads((trained / "trials.json").read_text()) == [
        {"seed": 0},
        {"seed": 1},
    ]
    record = json.loads((trained / "run.json").read_text())
    assert record["attention"].keys() == {"encoder", "decoder", "cross"}
    assert record["num_parameters"] > 1000 and record["versions"]["jax"]
    assert list(trained.glob("events.*")) and (trained / "tokenizer").is_dir()
    first, *_, last = rows(trained)
    assert first["step"] == 1 and last["step"] == 60 and "dev_bleu" in last
    assert all(row["target_fill"] > 0.9 for row in rows(trained) if "loss" in row)


def test_a_finished_run_stays_as_it_is(trained, little):
    before = final(trained)
    ran = run(train_command(trained, **little))
    assert ran.returncode == 0 and "trained already" in ran.stderr
    assert final(trained) == before


def test_a_workdir_of_another_config_is_refused(trained, little):
    ran = run(train_command(trained, **little, **{"model.width": 32}))
    refused(ran, "holds a run of another config", "model.width (there 16, now 32)")


def test_a_start_that_failed_does_not_keep_the_workdir(tmp_path):
    workdir = tmp_path / "run"
    refused(run([*train_command(workdir), "--config.data.target=xx"]), "'xx'")
    short = {"train.num_steps": 2, "train.eval_every_steps": 2}
    ran = run(train_command(workdir, **short))
    assert ran.returncode == 0, ran.stderr
    refused(run(train_command(workdir, seed=1)), "seed (there 0, now 1)")


def test_two_processes_do_not_share_a_workdir(tmp_path):
    workdir = tmp_path / "run"
    first = subprocess.Popen(
        train_command(workdir), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not (workdir / "config.json").exists() and first.poll() is None:
        time.sleep(0.01)
    refused(run(train_command(workdir)), "Another process is training in")
    first.kill()
    first.wait()


@pytest.mark.parametrize(
    "flag, parts",
    [
        ("--config.modle.width=3", ["config.modle.width", "config.model.width?"]),
        ("--config.model.widht=3", ["config.model.widht", "config.model.width?"]),
        (
            "--config.learning_rate=3",
            ["config.learning_rate", "config.optimizer.learning_rate?"],
        ),
        ("--config.model.width=wide", ["config.model.width", "'wide'"]),
        ("--wrokdir=x", ["wrokdir", "workdir"]),
        ("--config.train.num_steps=1.5", ["num_steps must be a whole number", "'1.5'"]),
        ("--config.data.joint_vocabulary=maybe", ["true or false, got 'maybe'"]),
        ("--config=configs/base.py:foo", ["base.py:foo: this config has no variants"]),
        ("--workdir=README.md", ["README.md: a file is where a folder must be"]),
        ("--config=configs/numbres.py", ["configs/numbres.py", "configs/"]),
        ("--config=configs/multi30k.py:tiny", [":full and :short", ":tiny"]),
        ("--config.model.attention.num_heads=3", ["num_heads", "3 and 16"]),
        ("--config.model.norm=both", ["model.norm", "post, pre", "'both'"]),
        ("--config.data.name=numbrs", ["numbrs", "numbers"]),
        ("--config.data.target=xx", ["'xx'"]),
        ("--config.optimizer.schedule=cosin", ["optimizer.schedule", "'cosin'"]),
        ("--config.train.best_metric=bleu", ["train.best_metric", "dev_bleu"]),
    ],
)
def test_a_bad_flag_is_named(tmp_path, flag, parts):
    refused(run([*train_command(tmp_path / "run"), flag]), *parts)
    assert not (tmp_path / "run" / "tokenizer").exists()  # before the data are read


def test_a_run_that_does_not_tell_its_data_is_named(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="does not tell what the run was trained on"):
        check_data(tmp_path, {"pairs": 1, "crc32": 0})


def test_missing_flags_and_words_are_named():
    refused(run(command("train.py")), "--config and --workdir are needed")
    refused(run(command("train.py", config="nope.py", workdir="x")), "file nope.py")
    refused(run(command("train.py", config="README.md")), "README.md, line")
    for script in ("train.py", "sweep.py"):
        assert "--workdir" in run([*command(script), "--help"]).stdout
    refused(run([*command("eval.py"), "x"]), "'x'")
    refused(run(command("eval.py", workdir="x")), "--split or --translate")
    refused(run(command("eval.py", workdir="x", split="val", top_k=3)), "--temperature")


FILTER = """
from configs.commandline import one_sentence, run
def main():
    with one_sentence():
        print("a line")
        print("another", flush=FLUSH)
run(main)
"""


@pytest.mark.parametrize("flush", ["True", "False"])
def test_a_reader_that_has_enough_ends_us_without_a_word(flush):
    read, write = os.pipe()
    os.close(read)
    code = FILTER.replace("FLUSH", flush)
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (ran.returncode, ran.stderr) == (1, b"")


@pytest.mark.parametrize(
    "source, target, parts",
    [
        (["a dog", "a cat"], ["ein Hund"], ["train.en", "2", "1"]),
        ([], [], ["train"]),
        (["", ""], ["", ""], ["train"]),
    ],
)
def test_a_bad_corpus_is_named(tmp_path, source, target, parts):
    overrides = write_corpus(tmp_path / "corpus", source, target)
    refused(run(train_command(tmp_path / "run", **overrides)), *parts)


def test_a_missing_folder_is_named(tmp_path):
    overrides = {"data.name": "multi30k", "data.directory": tmp_path / "none"}
    refused(run(train_command(tmp_path / "run", **overrides)), str(tmp_path / "none"))


def test_a_diverging_run_names_its_step(little, tmp_path):
    overrides = little | {"optimizer.learning_rate": 1e30}
    args = train_command(tmp_path / "run", **overrides)
    for steps in (60, 2):  # once more: what diverged is kept, if at the end too
        ran = run([*args, f"--config.train.num_steps={steps}"])
        sentence = refused(ran, "stopped being finite in all 2 trials")
        assert "checkpoints/" in sentence and "learning_rate" in sentence


def test_a_trial_is_scored_without_the_heads_that_its_gates_remove(trained, tmp_path):
    """Without cross-attention, nothing of the source is left in a translation."""
    workdir, out = tmp_path / "run", tmp_path / "out.txt"
    shutil.copytree(trained, workdir)
    gates = {"head_gates.cross.0.0": 0, "head_gates.cross.0.1": 0}
    trials = [{"seed": 0}, {"seed": 1, **gates}]
    (workdir / "trials.json").write_text(json.dumps(trials))
    args = command("eval.py", workdir=workdir, split="val", beam_size=1, output=out)
    ran = run(args)
    assert ran.returncode == 0, ran.stderr
    whole, gated = ((tmp_path / f"out-{n}.txt").read_text().splitlines() for n in "01")
    assert all(max(gated, key=len).startswith(line) for line in gated)
    assert not all(max(whole, key=len).startswith(line) for line in whole)


def limited(args, size):
    """A command whose files cannot grow past a size: to it the same as a full disk."""
    program = (
        "import os, resource, sys; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size})); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    return [sys.executable, "-c", program, *args]


def test_a_full_disk_stops_the_run_with_the_checkpoint_before_intact(
    trained, little, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)

    longer = train_command(workdir, **little, **{"train.num_steps": 80})
    metrics = (workdir / "metrics.jsonl").stat().st_size
    refused(run(limited(longer, metrics)), "metrics.jsonl can't be written")
    assert final(workdir) == final(trained)
    (workdir / "metrics.jsonl").write_text("")  # leaves only the checkpoint too large
    ran = run(limited(longer, 12_000))
    refused(ran, "could not be written", "step 60 is intact")
    assert final(workdir) == final(trained)
    ran = run(longer)
    assert ran.returncode == 0, ran.stderr


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


def test_ten_pairs_are_learnt_by_heart_and_translated(tmp_path):
    overrides = write_corpus(tmp_path / "corpus", TEN_PAIRS, TEN_PAIRS.values()) | {
        "seeds": 1,
        "data.vocab_size": 200,
        "data.batch_tokens": 256,
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
    workdir = tmp_path / "run"
    ran = run(train_command(workdir, **overrides))
    assert ran.returncode == 0, ran.stderr
    picture = tmp_path / "heads.png"
    args = {"split": "val", "beam_size": 2, "show": 1, "plot": picture}
    ran = run(command("eval.py", workdir=workdir, **args))
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads((workdir / "result-val.json").read_text())
    assert row["trial"] == row["seed"] == 0 and row["diverged_at"] is None
    assert row["bleu"] > 95
    assert row["signature"].startswith("nrefs:1|") and row["decoding"]["beam_size"] == 2
    assert next(iter(TEN_PAIRS)) in ran.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")

    first, second = list(TEN_PAIRS.items())[:2]
    lines = f"{first[0]}\n\n  \n{second[0]}"  # the last line without its end
    ran = run([*command("eval.py", workdir=workdir), "--translate"], input=lines)
    assert ran.stdout.split("\n") == [first[1], "", "", second[1], ""], ran.stderr


@pytest.fixture
def evaluated(capfd, monkeypatch):
    """eval.py in this process, for it to trace once; what it prints and says."""
    script = importlib.import_module("eval")
    for module, name in ((script.platform, "setup"), (script, "show_log")):
        monkeypatch.setattr(module, name, lambda: None)  # these change the process

    def evaluate(**options):
        with flagsaver.flagsaver():
            flags.FLAGS(command("eval.py", **options)[1:])
            script.main()
        return capfd.readouterr()

    return evaluate


@pytest.mark.parametrize(
    "option, value, sentence",
    [
        ("temperature", "nan", "--temperature must be finite, got nan"),
        ("output", "nodir/o.txt", "--output=nodir/o.txt must be a file in a folder"),
        ("plot", "nodir/p.png", "--plot=nodir/p.png must be a file in a folder"),
        ("plot", "p.xyz", "The suffix of --plot must be one of"),
    ],
)
def test_what_eval_cannot_do_is_refused_before_a_run_is_read(
    evaluated, capfd, option, value, sentence
):
    with pytest.raises(SystemExit, match="2"):
        evaluated(workdir="x", split="val", **{option: value})
    assert sentence in capfd.readouterr().err


def test_evaluating_by_every_checkpoint(trained, evaluated):
    metrics = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    dev = [m["dev_loss"] for m in metrics if m["step"] == 60 and "dev_loss" in m]
    steps = {}
    for which in ("best", "last", "average"):
        args = {"split": "val", "checkpoint": which, "beam_size": 1}
        ran = evaluated(workdir=trained, **args)
        found = json.loads((trained / "result-val.json").read_text())
        assert [(row["trial"], row["seed"]) for row in found] == [(0, 0), (1, 1)]
        assert {row["checkpoint"] for row in found} == {which}
        bleu = [row["bleu"] for row in found]
        for name, of in (("mean of 2", statistics.mean), ("sd", statistics.stdev)):
            (line,) = [line for line in ran.out.splitlines() if f"│ {name} " in line]
            assert f" {of(bleu):.2f} " in line
        (steps[which],) = {row["step"] for row in found}
        if which == "average":
            assert "Averaged 5 checkpoints" in ran.err
        else:
            assert [row["loss"] for row in found] == pytest.approx(dev, rel=1e-5)
    assert steps == {"best": 60, "last": 60, "average": 60}


def test_bad_input_to_eval_is_named(trained, tmp_path):
    refused(run(command("eval.py", workdir=tmp_path, split="val")), "holds no run")
    refused(run(command("eval.py", workdir=trained, split="tset")), "tset")
    ran = subprocess.run(
        [*command("eval.py", workdir=trained), "--translate"],
        cwd=ROOT,
        input=b"one\n\xff\xfe\n",
        capture_output=True,
    )
    assert ran.returncode == 2 and b"Line 2 of the input is not UTF-8" in ran.stderr
    unscored = tmp_path / "unscored"
    shutil.copytree(trained, unscored, ignore=shutil.ignore_patterns("60"))
    refused(run(command("eval.py", workdir=unscored, split="val")), "--checkpoint=last")
    empty = tmp_path / "empty"
    shutil.copytree(trained, empty, ignore=shutil.ignore_patterns("[0-9]*"))
    ran = run(command("eval.py", workdir=empty, split="val"))
    refused(ran, "holds no checkpoint")


def test_average_is_the_mean_of_the_kept_checkpoints(trained):
    script = importlib.import_module("eval")
    got = script.load(trained, "average")
    checkpoints = Checkpoints(trained)
    assert len(checkpoints.steps()) == 5
    each = [checkpoints.read(s, "params", got.params) for s in checkpoints.steps()]
    checkpoints.close()
    for mean, *leaves in zip(*map(jax.tree.leaves, [got.params, *each]), strict=True):
        np.testing.assert_allclose(mean, np.mean(leaves, axis=0), rtol=1e-6, atol=1e-7)
