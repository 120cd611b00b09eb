"""train.py and eval.py as their users run them: real processes, real signals."""

import importlib
import json
import os
import platform
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from flax import nnx
from ml_collections import config_flags

from headcount.analysis.evaluation import ranking, sentences, translations
from headcount.analysis.heads import loss_of, measure
from headcount.analysis.pruning import ORDERS, counts
from headcount.configs import run as config_of_run
from headcount.configs.base import get_config
from headcount.configs.commandline import (
    check_keys,
    check_none,
    flat,
    one_sentence,
    path_of,
    take_none,
)
from headcount.data import numbers, tokenizer
from headcount.data.batches import evaluation_batches
from headcount.decoding.generate import translate
from headcount.runtime.workdir import check_data, environment, processor
from headcount.sweeps.store import locked
from headcount.training.checkpoint import Checkpoints
from headcount.training.checks import check_config
from headcount.training.run import Trained, load, read

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
            logged = os.environ | {"JAX_LOG_COMPILES": "1"}
            ran = run(train_command(first, **little), env=logged)
            assert ran.returncode == 0, ran.stderr
            (first / "said.txt").write_text(ran.stderr)
    return shutil.copytree(first, tmp_path_factory.mktemp("trained") / "run")


def wait_for_step(process, workdir, step):
    while process.poll() is None:
        if (workdir / "metrics.jsonl").exists():
            text = (workdir / "metrics.jsonl").read_text()
            if f'"step": {step},' in text:
                return
        time.sleep(0.005)


NO_CROSS = {"head_gates.cross.0.0": 0, "head_gates.cross.0.1": 0}


@pytest.fixture(scope="session")
def still(shared, trained, little):
    """The workdir of a run that begins with that one and learns nothing.

    Its second trial has no cross-attention. What it said is in said.txt.
    """
    workdir = shared / "still"
    with locked(shared / "still.lock"):
        if not workdir.exists():
            trials = [{"seed": 7}, {"seed": 8, **NO_CROSS}]
            (shared / "still.json").write_text(json.dumps(trials))
            changes = little | {
                "seeds": 1,
                "model.dropout": 0.3,
                "optimizer.learning_rate": 0,
                "train.init_from": trained,
                "train.num_steps": 20,
                "train.eval_every_steps": 2,
                "train.patience": 2,
            }
            args = train_command(workdir, **changes)
            ran = run([*args, f"--trials={shared / 'still.json'}"])
            assert ran.returncode == 0, ran.stderr
            (workdir / "said.txt").write_text(ran.stderr)
    return workdir


def test_the_step_is_compiled_once_before_there_is_a_batch(trained):
    said = (trained / "said.txt").read_text()
    assert said.count("XLA compilation of jit(train_steps)") == 1
    assert said.index("XLA compilation of jit(train") < said.index("First step")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_stopped_run_ends_as_an_undisturbed_one(trained, little, tmp_path, number):
    """Stopped at random moments, started again: the same bits, the same metrics."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    for step in (generator.randrange(1, 25), generator.randrange(25, 55)):
        if number == signal.SIGTERM and workdir.exists():
            step = max(step, rows(workdir)[-1]["step"] + 1)  # one that is to come
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


SPY = """
import contextlib
import train
from configs.commandline import run
from training import metrics, step

steps = {"begun": 0, "read": 0}
train_steps, add, paused = step.train_steps, metrics.Window.add, metrics.Window.paused

def begin(state, arrays, batch, number, **static):
    steps["begun"] += number
    return train_steps(state, arrays, batch, number, **static)

begin.lower = train_steps.lower

def count(window, of_step):
    steps["read"] += 1
    return add(window, of_step)

@contextlib.contextmanager
def pause(window):
    print(steps["begun"], steps["read"])
    with paused(window):
        yield

step.train_steps, metrics.Window.add, metrics.Window.paused = begin, count, pause
run(train.main)
"""


def test_what_is_computed_in_a_pause_is_none_of_it(little, tmp_path):
    """Or its tokens would count, and their time would not."""
    steps = {"train.num_steps": 12, "train.log_every_steps": 12}
    steps |= {"train.eval_every_steps": 5, "train.checkpoint_every_steps": 7}
    args = train_command(tmp_path / "run", **little | steps)[2:]
    ran = run([sys.executable, "-c", SPY, *args, "--profile=2:1"])
    assert ran.returncode == 0, ran.stderr
    pauses = [tuple(map(int, line.split())) for line in ran.stdout.splitlines()]
    assert {2, 3, 5, 7, 10, 12} <= {begun for begun, _ in pauses}
    assert all(read == begun for begun, read in pauses)


def test_what_a_run_leaves(trained):
    assert json.loads((trained / "config.json").read_text())["model"]["width"] == 16
    assert json.loads((trained / "trials.json").read_text()) == [
        {"seed": 0},
        {"seed": 1},
    ]
    record = json.loads((trained / "run.json").read_text())
    assert record["attention"].keys() == {"encoder", "decoder", "cross"}
    assert record["num_parameters"] > 1000 and record["versions"]["jax"]
    assert record["started"]
    assert list(trained.glob("events.*")) and (trained / "tokenizer").is_dir()
    first, *_, last = rows(trained)
    assert first["step"] == 1 and last["step"] == 60 and "dev_bleu" in last
    assert all(row["target_fill"] > 0.9 for row in rows(trained) if "loss" in row)


def test_each_trial_of_a_run_has_an_order_of_its_own(trained):
    fills = [row["source_fill"] for row in rows(trained) if "loss" in row]
    first, second = np.reshape(fills, (60, 2)).T
    assert (first != second).any()


BEST = """
import json
import train
from configs.commandline import run
def loop(config, workdir, trials, ready, stop, profile):
    print(json.dumps([ready.best[name].tolist() for name in ("step", "score")]))
train.loop = loop
run(train.main)
"""


def test_a_run_that_goes_on_knows_its_best(trained, little):
    """Else its next evaluation would be, however bad."""
    args = train_command(trained, **little)[2:]
    ran = run([sys.executable, "-c", BEST, *args])
    assert ran.returncode == 0, ran.stderr
    steps, scores = json.loads(ran.stdout)
    dev = {row["trial"]: row for row in rows(trained) if "dev_loss" in row}
    wanted = ranking(dev, "dev_exact_match", 2).tolist()  # of configs/numbers.py
    assert (steps, scores) == ([60, 60], wanted)


def test_a_finished_run_stays_as_it_is(trained, little):
    before = final(trained)
    ran = run(train_command(trained, **little))
    assert ran.returncode == 0 and "trained already" in ran.stderr
    assert "without an evaluation" not in ran.stderr
    assert final(trained) == before


def test_a_run_of_before_a_key_existed_goes_on_and_is_scored(
    trained, little, evaluated, tmp_path
):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    config = json.loads((workdir / "config.json").read_text())
    del config["model"]["attention"]["merge_gain"]
    del config["model"]["cross_attention"]["merge_gain"]
    (workdir / "config.json").write_text(json.dumps(config))
    evaluated(workdir=workdir, split="val", beam_size=1)
    found = json.loads((workdir / "result-val.json").read_text())
    assert len(found) == 2 and found[0]["step"] == 60
    ran = run(train_command(workdir, **little))
    assert ran.returncode == 0 and "trained already" in ran.stderr, ran.stderr


def test_a_run_that_now_ends_where_it_was_stopped_tells_what_it_lacks(
    trained, little, tmp_path
):
    shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "60")
    ran = run(train_command(tmp_path / "run", **little | {"train.num_steps": 56}))
    assert ran.returncode == 0 and "trained already: 56 of 56" in ran.stderr
    assert "Step 56 was saved without an evaluation" in ran.stderr
    refused(run(command("eval.py", workdir=tmp_path / "run", split="val")), "--check")


@pytest.mark.parametrize(
    "change, parts",
    [
        ({"model.width": 32}, ["of another config", "model.width (there 16, now 32)"]),
        ({"data.directory": "other"}, ["The training data are not those"]),
        ({"data.directory": "dev"}, ["The dev set is not that which"]),
        ({"train.num_steps": 30}, ["is trained for 60 steps already", "num_steps=30"]),
    ],
)
def test_what_a_workdir_cannot_go_on_as_is_refused(
    trained, little, tmp_path, change, parts
):
    """And eval.py goes on scoring what was trained."""
    if change.get("data.directory") == "other":
        change = write_corpus(tmp_path / "other", ["a dog"] * 9, ["ein Hund"] * 9)
    elif "data.directory" in change:
        shutil.copytree(little["data.directory"], tmp_path / "dev")
        (tmp_path / "dev" / "val.de").write_text("ein Hund\n" * 200)
        change = {"data.directory": tmp_path / "dev"}
    before = {path: path.read_bytes() for path in trained.glob("*.json")}
    refused(run(train_command(trained, **little | change)), *parts)
    assert {path: path.read_bytes() for path in trained.glob("*.json")} == before


def test_a_start_that_failed_does_not_keep_the_workdir(little, tmp_path):
    """Nor its vocabulary, which is of another config."""
    workdir = tmp_path / "run"
    parts = {"train.accumulate_steps": 1000, "data.vocab_size": 60}
    refused(run(train_command(workdir, **little | parts)), "accumulate_steps")
    (workdir / "tokenizer" / "my.model").write_text("precious")
    assert tokenizer.load(workdir / "tokenizer")[0].vocab_size == 60
    short = {"train.num_steps": 2, "train.eval_every_steps": 2}
    ran = run(train_command(workdir, **little | short))
    assert ran.returncode == 0, ran.stderr
    assert tokenizer.load(workdir / "tokenizer")[0].vocab_size == 80
    assert (workdir / "tokenizer" / "my.model").exists()
    refused(run(train_command(workdir, **little, seed=1)), "seed (there 0, now 1)")


def test_a_start_that_failed_does_not_keep_its_vocabulary(tmp_path):
    """Which is of other sentences, if they have been mended since."""
    workdir, folder = tmp_path / "run", tmp_path / "corpus"
    overrides = write_corpus(folder, ["cat " * 999] * 9, ["Katze"] * 9)
    overrides |= {"train.num_steps": 2, "train.eval_every_steps": 2}
    refused(run(train_command(workdir, **overrides)), "no training pair is left")
    write_corpus(folder, ["dog"] * 9, ["Hund"] * 9)
    ran = run(train_command(workdir, **overrides))
    assert ran.returncode == 0, ran.stderr
    made = tokenizer.load(workdir / "tokenizer")[0]
    assert made.decode(made.encode(["dog Hund"])[0]) == "dog Hund"


def test_a_folder_of_another_program_stays_as_it_is(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    files = {
        tmp_path / "config.json": '{"model_type": "bert"}',
        tmp_path / "tokenizer" / "my.model": "precious",
    }
    for path, text in files.items():
        path.write_text(text)
    refused(run(train_command(tmp_path)), "config.json is not what train.py writes")
    there = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert there == files


def test_two_processes_do_not_share_a_workdir(tmp_path):
    workdir = tmp_path / "run"
    first = subprocess.Popen(
        train_command(workdir), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not (workdir / ".lock").exists() and first.poll() is None:
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
        ("--workdir=", ["--workdir is empty"]),
        ("--config=configs/multi30k.py:tiny", [":full and :short", ":tiny"]),
        ("--config.train.num_steps=0", ["train.num_steps must be at least 1"]),
        ("--config.model.width=None", ["config.model.width must have a value"]),
        ("--config.data.name=numbrs", ["numbrs", "numbers"]),
        ("--config.data.target=xx", ["'xx'"]),
        ("--config.data.directory=x", ["numbers", "TFDS_DATA_DIR"]),
    ],
)
def test_a_bad_flag_is_named(tmp_path, flag, parts):
    refused(run([*train_command(tmp_path / "run"), flag]), *parts)
    assert not list((tmp_path / "run").glob("[!.]*"))  # before the data are read


def test_a_file_that_is_no_config_is_named(tmp_path):
    ran = run(command("train.py", config="configs/ablations.py", workdir=tmp_path))
    refused(ran, "has no function get_config(); see configs/base.py")


def test_keys_that_a_config_file_adds_or_lacks_are_named():
    """The first would have no effect, the second end in a traceback."""
    config = get_config()
    check_keys(config)
    config.train.num_step = 3
    with pytest.raises(ValueError, match="sets train.num_step, .* config.train.num_st"):
        check_keys(config)
    config = get_config()
    del config.model.attention.merge
    with pytest.raises(ValueError, match="lacks model.attention.merge; begin with"):
        check_keys(config)


def test_a_tilde_is_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    named = {"~/runs": "/home/me/runs", "a~b/~": "a~b/~", "/x": "/x"}
    for value, path in named.items():
        assert path_of(SimpleNamespace(name="workdir", value=value)) == Path(path)


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("model.attention.num_heads", 3, "num_heads.* 3 and 128"),
        ("model.norm", "both", "model.norm must be one of post, pre, got 'both'"),
        ("optimizer.schedule", "cosin", "optimizer.schedule must .* got 'cosin'"),
        ("train.best_metric", "bleu", "train.best_metric must .* dev_bleu"),
        ("train.num_steps", 0, "train.num_steps must be at least 1, got 0"),
        ("data.batch_tokens", 2**31, r"batch_tokens must be below 2\^31, got 2147"),
        ("model.bos", 8000, "model.bos must be from 0 to below 8000, .* got 8000"),
        ("model.bos", -1, "model.bos must be from 0"),
        ("model.norm_epsilon", -1.0, "model.norm_epsilon must be above 0 .* got -1.0"),
        ("model.norm_epsilon", 0.0, "model.norm_epsilon must be above 0"),
        ("model.norm_epsilon", float("nan"), "model.norm_epsilon must .* got nan"),
    ],
)
def test_a_config_that_cannot_be_trained_is_named(key, value, words):
    config = get_config()
    check_config(config)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ValueError, match=words):
        check_config(config)


def test_what_has_no_default_may_be_none():
    take_none()
    given = {
        "model.attention.num_kv_heads": ("None", None),
        "model.dtype": ("None", None),
        "train.patience": ("3", 3),
        "data.target": ("fr", "fr"),
    }
    argv = ["x", *(f"--config.{key}={text}" for key, (text, _) in given.items())]
    values, config = flags.FlagValues(), get_config()
    config_flags.DEFINE_config_dict("config", config, flag_values=values, sys_argv=argv)
    values(argv)
    check_none(values.config, values["config"].override_values)
    found = flat(values.config.to_dict())
    assert {key: found[key] for key in given} == {k: v for k, (_, v) in given.items()}


@pytest.mark.parametrize("text", ["{}", "[]", '{"data": 3}', '{"data": {"pairs": 1}}'])
def test_a_run_that_does_not_tell_its_data_is_named(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match="run.json (does not tell|is not what)"):
        check_data(tmp_path, {"pairs": 1, "crc32": 0, "dev_crc32": 0})


def test_a_run_goes_on_with_its_dev_set_or_one_that_it_does_not_tell(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    told = {"pairs": 1, "crc32": 0}  # as runs of before did
    (tmp_path / "run.json").write_text(json.dumps({"data": told}))
    check_data(tmp_path, told | {"dev_crc32": 2})
    (tmp_path / "run.json").write_text(json.dumps({"data": told | {"dev_crc32": 1}}))
    check_data(tmp_path, told | {"dev_crc32": 1})
    with pytest.raises(ValueError, match="The dev set is not that which"):
        check_data(tmp_path, told | {"dev_crc32": 2})


def test_missing_flags_and_words_are_named():
    refused(run(command("train.py")), "--config and --workdir are needed")
    refused(run(command("train.py", config="nope.py", workdir="x")), "file nope.py")
    refused(run(command("train.py", config="README.md")), "README.md, line")
    for script in ("train.py", "sweep.py"):
        assert "--workdir" in run([*command(script), "--help"]).stdout
    refused(run([*command("eval.py"), "x"]), "'x'")
    refused(run(command("eval.py", workdir="x")), "--split, --translate and --score")
    refused(run(command("eval.py", workdir="x", split="val", top_k=3)), "--temperature")
    too_large = {"seed": 2**31, "beam_size": 10**6, "batch_size": 10**10}
    too_large["length_penalty"] = 1e39
    for flag, value in too_large.items():
        ran = run(command("eval.py", workdir="x", split="val", **{flag: value}))
        refused(ran, f"--{flag}={value}")


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


def test_ctrl_c_ends_in_one_sentence():
    code = "from configs.commandline import run\ndef main(): raise KeyboardInterrupt"
    ran = subprocess.run(
        [sys.executable, "-c", f"{code}\nrun(main)"], cwd=ROOT, stderr=subprocess.PIPE
    )
    assert (ran.returncode, ran.stderr) == (130, b"-c: stopped by Ctrl-C.\n")


CLOSED = """
import sys
from configs.commandline import run
def main():
    print("a line")
    print("a word", file=sys.stderr)
    assert sys.stdin.read() == ""
    with open("FILE", "w") as file:
        file.write(str(file.fileno()))
run(main)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_from_the_start_is_empty(tmp_path, closed):
    code = CLOSED.replace("FILE", str(tmp_path / "file"))
    call = shlex.join([sys.executable, "-c", code])
    ran = run(["sh", "-c", f"{call} {closed}"], stdin=subprocess.DEVNULL)
    assert ran.returncode == 0, ran.stderr
    assert int((tmp_path / "file").read_text()) > 2


def test_git_need_not_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment()["commit"] is None


def test_a_processor_is_told_by_its_name(monkeypatch):
    """JAX calls every one of them "cpu"."""
    assert set(environment()["devices"]) == {f"cpu: {processor()}"} != {"cpu: cpu"}
    x86 = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"
    monkeypatch.setattr(Path, "read_text", lambda path: x86)
    assert processor() == "Some CPU @ 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda path: "CPU implementer\t: 0x41\n")
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert processor() == "aarch64"


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 64 B"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Failed to allocate 64 B.\nx"),
        MemoryError("Unable to allocate 64 B"),
        MemoryError(),
    ],
)
def test_exhausted_memory_is_told_with_what_needs_less(
    monkeypatch, capsys, script, error
):
    monkeypatch.setattr(sys, "argv", [f"somewhere/{script}"])
    with pytest.raises(SystemExit, match="2"), one_sentence(OSError):
        raise error
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{script}: The memory is exhausted (")
    assert "64 B)" in said or not str(error)
    if script == "eval.py":
        assert "--beam_size or --batch_size" in said
    else:
        keys = {"data.batch_tokens", "train.accumulate_steps", "train.remat", "seeds"}
        assert keys <= flat(get_config().to_dict()).keys()
        assert all(key in said for key in keys)


def test_what_is_no_lack_of_memory_keeps_its_traceback():
    for text in ("INTERNAL: a bug", "RESOURCE_EXHAUSTED: too many open files"):
        error = jax.errors.JaxRuntimeError(text)
        with pytest.raises(jax.errors.JaxRuntimeError), one_sentence():
            raise error


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
    trials = [{"seed": 0}, {"seed": 1, **NO_CROSS}]
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


BY_HEART = {
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


def test_ten_pairs_are_learnt_by_heart_and_translated(tmp_path):
    """With two vocabularies, so that taking one for the other is noticed."""
    apart = {"data.joint_vocabulary": False, "data.vocab_size": 120}
    corpus = write_corpus(tmp_path / "corpus", TEN_PAIRS, TEN_PAIRS.values())
    workdir = tmp_path / "a run"
    ran = run(train_command(workdir, **corpus | BY_HEART | apart))
    assert ran.returncode == 0, ran.stderr
    hint = ran.stderr.splitlines()[-1].partition("python ")[2]
    assert shlex.split(hint) == ["eval.py", f"--workdir={workdir}", "--split=val"]
    picture = tmp_path / "heads.png"
    args = {"split": "val", "beam_size": 2, "show": 1, "plot": picture}
    ran = run(command("eval.py", workdir=workdir, **args))
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads((workdir / "result-val.json").read_text())
    assert row["trial"] == row["seed"] == 0 and row["diverged_at"] is None
    dev = rows(workdir)[-1]
    assert row["bleu"] > 95 and dev["dev_bleu"] > 95
    assert row["loss"] == pytest.approx(dev["dev_loss"], rel=1e-4)
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
    script = importlib.import_module("headcount.eval")
    for module, name in ((script.platform, "setup"), (script, "show_log")):
        monkeypatch.setattr(module, name, lambda: None)  # these change the process

    def evaluate(**options):
        with flagsaver.flagsaver():
            flags.FLAGS(command("eval.py", **options)[1:])
            script.main()
        return capfd.readouterr()

    return evaluate


TRANSLATE = {"split": None, "translate": True}
SCORE = {"split": None, "score": True}


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"temperature": "nan"}, "--temperature must be finite, got nan"),
        ({"temperature": 1, "beam_size": 3}, "--beam_size is of beam search, and"),
        ({"temperature": 1, "length_penalty": 1}, "--length_penalty is of beam search"),
        ({"split": "val,"}, "--split=val, must name splits"),
        ({"output": "nodir/o.txt"}, "--output=nodir/o.txt must be a file in a folder"),
        ({"output": "dSPLIT", "split": "ocs"}, "--output=dSPLIT must be a file in"),
        ({"plot": "nodir/p.png"}, "--plot=nodir/p.png must be a file in a folder"),
        ({"plot": "p.xyz"}, "The suffix of --plot must be one of"),
        ({"plot": "p.png", "split": "val,test"}, "--plot=p.png would hold the last"),
        ({"site": "encoder"}, "--site says what to draw or prune, so add --plot"),
        ({"sentence": 1}, "--sentence says what to draw, so add --plot"),
        ({"seed": 3}, "nothing is sampled at --temperature=0"),
        ({"n_best": 2}, "--n_best says what to write, so add --output"),
        (TRANSLATE | {"n_best": 6}, "--n_best must be at most --beam_size=5, got 6"),
        (TRANSLATE | {"n_best": 1, "temperature": 1}, "--n_best is of beam search"),
        (TRANSLATE | {"score": True}, "--split, --translate and --score"),
        ({"score": True}, "--split, --translate and --score"),
        (SCORE | {"beam_size": 5}, "--beam_size says how to decode, and --score"),
        (SCORE | {"seed": 0}, "--seed says how to decode, and --score"),
        (SCORE | {"output": "o.txt"}, "--score prints what it finds; leave --output"),
        (SCORE | {"heads": True}, "--heads needs the references"),
        (SCORE | {"coordinator": "x:1"}, "--score takes one process"),
        (TRANSLATE | {"output": "o.txt"}, "leave --output out"),
        (TRANSLATE | {"show": 3}, "--show needs the references"),
        (TRANSLATE | {"prune": True}, "--prune needs the references"),
        ({"coordinator": "x:1", "prune": True}, "--prune takes one process"),
    ],
)
def test_what_eval_cannot_do_is_refused_before_a_run_is_read(
    evaluated, capfd, monkeypatch, options, sentence
):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="2"):
        given = {"workdir": "x", "split": "val"} | options
        evaluated(**{k: v for k, v in given.items() if v is not None})
    assert sentence in capfd.readouterr().err


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "seed": 7},
        {"beam_size": 3, "length_penalty": 1.5},
        {"beam_size": 1},
        {"beam_size": 1, "length_penalty": 1.5, "n_best": 1},  # by which it divides
    ],
)
def test_the_flags_of_decoding_that_count_are_told(given):
    script = importlib.import_module("headcount.eval")
    with flagsaver.flagsaver():
        flags.FLAGS(command("eval.py", **given)[1:])
        assert script.decoding_options() | {"n_best": given.get("n_best")} == (
            {"n_best": None} | given
        )


@pytest.mark.parametrize(
    "diverged_at, given, trials",
    [
        ([None, 7, None], {}, [0, 2]),
        ([None, 7, None], {"trial": 1}, [1]),
        ([7, 8], {}, [0]),
    ],
)
def test_a_trial_that_diverged_is_pruned_if_it_is_named_or_all_did(
    monkeypatch, tmp_path, diverged_at, given, trials
):
    script = importlib.import_module("headcount.eval")

    def curve(run, dev, pairs, trials, site, **options):
        return [{"trial": trial, "bleu": 1.0} for trial in trials]

    monkeypatch.setattr("headcount.analysis.pruning.curve", curve)
    for shown in ("table.print_pruning", "plots.plot_pruning"):
        monkeypatch.setattr(f"analysis.{shown}", lambda *_: None)
    config, count = get_config(), len(diverged_at)
    fields = dict.fromkeys(Trained._fields) | {"config": config, "step": [9] * count}
    made = Trained(**fields | {"diverged_at": diverged_at, "trials": [{}] * count})
    val, test = (SimpleNamespace(split=split) for split in ("val", "test"))
    with flagsaver.flagsaver():
        flags.FLAGS(command("eval.py", **given)[1:])
        script.prune(made, val, test, tmp_path, {})
    rows = json.loads((tmp_path / "pruning-test.json").read_text())
    assert [row["trial"] for row in rows] == trials
    assert [row["diverged_at"] for row in rows] == [diverged_at[t] for t in trials]


def test_lines_without_a_token_stay_empty_and_batches_are_as_asked(monkeypatch, capsys):
    """Of white space, or of what the vocabulary's normalisation takes away."""
    script = importlib.import_module("headcount.eval")
    side = tokenizer.Tokenizer(tokenizer.train(["a b c", "d e f"], 17))
    asked = []

    def translate(graph, params, sentences, **options):
        asked.append(options | {"params": params})
        return [ids[:-1] for ids in sentences], None

    lines = ["a b", " ", "\ufeff", "\x01", "", "d e"]
    monkeypatch.setattr("headcount.training.run.translate", translate)
    monkeypatch.setattr(
        "headcount.runtime.stdin.lines_at_hand", lambda file, most: [lines]
    )
    nothing = {name: {} for name in ("graph", "head_gates", "diverged_at")}
    trained = Trained(
        config=get_config(),
        trials=[{}, {}],
        step=[0, 0],
        params=np.array([10, 11]),
        tokenizers=(side, side),
        **nothing,
    )
    with flagsaver.flagsaver(), open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        flags.FLAGS(command("eval.py", batch_size=7, trial=1)[1:])
        script.take_lines(trained, {})
    assert capsys.readouterr().out.split("\n") == ["a b", "", "", "", "", "d e", ""]
    (options,) = asked
    assert options["sample_numbers"] == [0, 5] and options["batch_size"] == 7
    assert options["params"] == 11, "of the trial that was asked for"


def test_lists_of_the_n_best_are_numbered_on(monkeypatch, capsys):
    """From batch to batch; a sentence has as many lines as translations."""
    script = importlib.import_module("headcount.eval")
    batches = [["a", "b"], ["c"]]
    monkeypatch.setattr(
        "headcount.runtime.stdin.lines_at_hand", lambda file, most: batches
    )

    def translate(lines, trial, *, n_best, first, batch_size):
        best = [(line, -1.0 - first) for line in lines]
        return [[each, ("", -4.5)][:n_best] for each in best]

    trained = SimpleNamespace(
        config=get_config(),
        step=[0],
        tokenizers=[SimpleNamespace(encode=lambda lines: lines)],
        translate=translate,
    )
    with flagsaver.flagsaver(), open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        flags.FLAGS(command("eval.py", n_best=2)[1:])
        script.take_lines(trained, {})
    assert capsys.readouterr().out.splitlines() == [
        "0 ||| a ||| -1.0000",
        "0 |||  ||| -4.5000",
        "1 ||| b ||| -1.0000",
        "1 |||  ||| -4.5000",
        "2 ||| c ||| -3.0000",
        "2 |||  ||| -4.5000",
    ]


def test_pairs_are_scored_by_the_trial_that_is_asked_for(monkeypatch, capsys):
    """A line each, flushed when its batch is done; a bad line is told by its number."""
    script = importlib.import_module("headcount.eval")
    batches = [["a\tb", "c\t"], ["d"]]
    monkeypatch.setattr(
        "headcount.runtime.stdin.lines_at_hand", lambda file, most: batches
    )
    flushed = []

    def score(sources, targets, trial):
        assert (sources, targets, trial) == (["a", "c"], ["b", ""], 1)
        monkeypatch.setattr(sys.stdout, "flush", lambda: flushed.append(True))
        return [(-1.25, 2), (-100.0, 1)]

    with flagsaver.flagsaver(), open(os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        flags.FLAGS(command("eval.py", score=True, trial=1)[1:])
        config = SimpleNamespace(data=SimpleNamespace(max_length=1))
        sides = (SimpleNamespace(encode=lambda lines: lines),) * 2
        trained = SimpleNamespace(
            config=config, tokenizers=sides, step=[0, 0], score=score
        )
        with pytest.raises(ValueError, match="Line 3 of the input has 1 tab-separated"):
            script.take_lines(trained, {})
    assert capsys.readouterr().out == "-1.2500\t2\n-100.0000\t1\n" and flushed


def test_a_file_that_may_not_be_written_is_refused(evaluated, capfd, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with pytest.raises(SystemExit, match="2"):
        evaluated(workdir="x", split="val", output="o.txt")
    assert "--output=o.txt: o.txt can't be written" in capfd.readouterr().err


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


def test_a_picture_is_of_the_sentence_and_the_site_asked_for(
    trained, evaluated, tmp_path, monkeypatch
):
    drawn = []
    monkeypatch.setattr(
        "headcount.analysis.plots.plot_maps", lambda *given: drawn.append(given)
    )
    options = {"workdir": trained, "split": "val", "checkpoint": "last"}
    options |= {"beam_size": 1, "plot": tmp_path / "SPLIT.pdf", "sentence": 3}
    evaluated(**options, site="decoder", trial=1, output=tmp_path / "SPLIT.txt")
    ((maps, queries, keys, axes, path),) = drawn
    line = (tmp_path / "val-1.txt").read_text().splitlines()[3]
    said = "".join(queries[:-1]).replace("▁", " ").strip()
    assert (said, axes) == (line, ("translation", "before it"))
    assert keys == ["<s>", *queries[:-1]] and path == tmp_path / "val.pdf"
    assert maps.shape[2:] == (len(queries), len(keys))


def test_the_n_best_are_written_and_the_best_are_scored(
    trained, evaluated, tmp_path, monkeypatch
):
    """By a decoder whose best is the reference."""

    def decoded(run, pairs, trials, gates, *, n_best, **options):
        assert n_best == 2
        lists = [[(ids[:-1].tolist(), -0.25), ([], -1.5)] for ids in pairs.target]
        return np.ones(len(trials)), dict.fromkeys(trials, lists)

    monkeypatch.setattr("headcount.training.run.decoded", decoded)
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    out = tmp_path / "SPLIT.txt"
    evaluated(workdir=workdir, split="val", n_best=2, output=out)
    found = json.loads((workdir / "result-val.json").read_text())
    assert [row["exact_match"] for row in found] == [1, 1]
    lines = (tmp_path / "val-1.txt").read_text().splitlines()
    references = read(load(workdir), "val").references
    assert lines[::2] == [f"{i} ||| {x} ||| -0.2500" for i, x in enumerate(references)]
    assert lines[1::2] == [f"{i} |||  ||| -1.5000" for i in range(len(references))]


def test_a_sentence_that_is_not_there_is_refused(trained, evaluated, tmp_path, capfd):
    options = {"plot": tmp_path / "p.png", "sentence": 10**6}
    with pytest.raises(SystemExit, match="2"):
        evaluated(workdir=trained, split="val", **options)
    assert "--sentence=1000000 is not in val, whose last is" in capfd.readouterr().err


def test_the_heads_of_a_trial_are_told(trained, evaluated, tmp_path):
    """And its translations shown, not those of the first one."""
    options = {"split": "val", "checkpoint": "last", "beam_size": 1, "trial": 1}
    options |= {"show": 200, "output": tmp_path / "SPLIT.txt"}
    said = evaluated(workdir=trained, heads=True, **options).out
    rows = json.loads((trained / "heads-val.json").read_text())
    assert {row["trial"] for row in rows} == {1}
    made = load(trained, "last")
    params, dev = jax.tree.map(lambda x: x[1], made.params), read(made, "val")
    of_it = measure(made.graph, params, {}, dev.source, dev.target, 512)
    for name in ("entropy", "importance", "added_loss", "alone"):
        told, wanted = ([row[name] for row in found] for found in (rows, of_it))
        np.testing.assert_allclose(told, wanted, rtol=1e-5, atol=1e-7)
    files = [(tmp_path / f"val-{trial}.txt").read_text() for trial in (0, 1)]
    first, second = (text.removesuffix("\n").split("\n") for text in files)
    mark = "translation  "
    shown = [line for line in said.splitlines() if line.startswith(mark)]
    assert [line.removeprefix(mark) for line in shown] == second != first
    for site in ("encoder", "decoder", "cross"):
        assert f"{site}, trial 1, val" in said
        entropies = [row["entropy"] for row in rows if row["site"] == site]
        assert entropies and all(f" {entropy:.2f} " in said for entropy in entropies)


@pytest.mark.parametrize("given, told", [({}, [0, 2]), ({"trial": 1}, [1])])
def test_the_heads_of_all_trials_are_told_but_of_those_that_diverged(
    given, told, tmp_path, monkeypatch
):
    script = importlib.import_module("headcount.eval")

    def measure(graph, params, *_):
        return [{"params": int(params)}]

    printed = []
    monkeypatch.setattr("headcount.analysis.heads.measure", measure)
    monkeypatch.setattr(
        "headcount.analysis.tables.print_heads", lambda *a: printed.append(a)
    )
    made = dict.fromkeys(Trained._fields) | {"config": get_config(), "step": [9, 9, 9]}
    made |= {"params": np.array([10, 11, 12]), "diverged_at": [None, 7, None]}
    pairs = SimpleNamespace(split="val", source=None, target=None)
    with flagsaver.flagsaver():
        flags.FLAGS(command("eval.py", **given)[1:])
        script.tell_heads(Trained(**made), pairs, tmp_path)
    rows = json.loads((tmp_path / "heads-val.json").read_text())
    assert rows == [{"trial": trial, "params": 10 + trial} for trial in told]
    assert printed == [(rows, "val", tmp_path / "heads-val.json")]


def test_a_run_begins_with_another(trained, still):
    """Each trial has the other run's best parameters."""
    said = (still / "said.txt").read_text()
    assert "differs in model.dropout (there 0.1, now 0.3)" in said
    assert "Beginning with" in said and "step 60, 60" in said
    ours, theirs = load(still, "last"), load(trained, "best")
    assert ours.tokenizers[0].vocabulary == theirs.tokenizers[0].vocabulary
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


def test_dev_is_scored_without_the_heads_that_a_trials_gates_remove(trained, still):
    (first, second), (whole, gated) = (
        [row["dev_loss"] for row in rows(workdir) if "dev_loss" in row][-2:]
        for workdir in (trained, still)
    )
    assert whole == pytest.approx(first, rel=1e-5)
    assert abs(gated - second) > 1e-3


def test_patience_counts_evaluations(still):
    """None is better than the first, at step 2."""
    found = [row["stopped_at"] for row in rows(still) if "stopped_at" in row]
    assert found == [6, 6]
    assert load(still, "last").step == [6, 6] and load(still, "best").step == [2, 2]


def test_the_config_of_a_run(trained, tmp_path):
    there = json.loads((trained / "config.json").read_text())
    assert config_of_run.get_config(str(trained)).to_dict() == there
    (tmp_path / "config.json").write_text(json.dumps(there | {"modle": 3}))
    for folder, said in ((tmp_path, '"modle"'), (tmp_path / "x", "there is no ")):
        args = command("train.py", config=f"configs/run.py:{folder}", workdir="w")
        assert len(refused(run(args), said, str(folder))) < 300


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"seeds": 3}, "has 2 trials, and 3 are to begin with them"),
        ({"model.mlp_dim": 24}, "model.mlp_dim (there 16, now 24)"),
        ({"train.init_from": "nowhere"}, "train.init_from=nowhere holds no run"),
    ],
)
def test_what_a_run_cannot_begin_with(trained, little, tmp_path, changes, sentence):
    given = little | {"train.init_from": trained} | changes
    refused(run(train_command(tmp_path / "run", **given)), sentence)


def test_heads_are_removed_the_least_important_first(trained, evaluated):
    options = {"split": "val", "checkpoint": "last", "beam_size": 1}
    said = evaluated(workdir=trained, prune=True, **options).out
    assert (trained / "pruning-val.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((trained / "pruning-val.json").read_text())
    whole = json.loads((trained / "result-val.json").read_text())
    made = load(trained, "last")
    dev = read(made, "val")
    for trial, result in enumerate(whole):
        graph, (params, _) = made.graph, made.of(trial)
        told = measure(graph, params, {}, dev.source, dev.target, 512)
        norms = {}
        for row in told:
            norms.setdefault((row["site"], row["layer"]), []).append(row["importance"])
        for row in told:
            norm = np.linalg.norm(norms[row["site"], row["layer"]])
            row["normalized_importance"] = row["importance"] / norm
        drawn = {r["draw"]: r["gone"] for r in found if r["order"] == "random"}
        assert len({tuple(gone) for gone in drawn.values()}) == len(drawn) == 3
        for order in ORDERS:
            whose = (trial, order, 0)
            of_order = [
                r for r in found if (r["trial"], r["order"], r["draw"]) == whose
            ]
            assert [row["removed"] for row in of_order] == counts(len(told))
            everything = of_order[-1]["gone"]
            for row in of_order:
                assert row["gone"] == everything[: row["removed"]]
                assert row["ranked_on"] == "val" and row["heads"] == len(told)
            if order != "random":
                values = {f"{r['site']}.{r['layer']}.{r['head']}": r for r in told}
                falls = -np.diff([values[name][order] for name in everything])
                assert falls.max() < 1e-6
            first, middle = of_order[0], of_order[3]
            scores = ("bleu", "chrf", "exact_match", "signature")
            assert [first[s] for s in scores] == [result[s] for s in scores]
            assert first["loss"] == pytest.approx(result["loss"], rel=1e-6)
            gates = jax.tree.map(np.array, nnx.merge(graph, params).head_gates())
            for name in middle["gone"]:
                site, layer, head = name.split(".")
                gates[site][int(layer), int(head)] = 0
            batches = evaluation_batches(dev.source, dev.target, batch_tokens=512)
            loss = sum(float(loss_of(graph, params, gates, b)) for b in batches)
            loss /= len(dev.target.tokens)
            assert middle["loss"] == pytest.approx(loss, rel=1e-5)
    means = [
        statistics.mean(r["loss"] for r in found if (r["removed"], r["order"]) == at)
        for at in ((0, "random"), (counts(len(told))[3], "added_loss"))
    ]
    assert "mean of 2 trials, val" in said
    assert all(f" {mean:.3f} ± " in said for mean in means)


def test_the_heads_of_one_site_are_removed(trained, evaluated):
    beside = {path: path.read_bytes() for path in trained.glob("pruning-val.*")}
    options = {"split": "val", "checkpoint": "last", "beam_size": 1, "trial": 1}
    said = evaluated(workdir=trained, prune=True, site="decoder", **options).out
    assert "without decoder heads, trial 1, val" in said
    assert (trained / "pruning-val-decoder.png").exists()
    assert beside == {path: path.read_bytes() for path in beside}
    found = json.loads((trained / "pruning-val-decoder.json").read_text())
    made = load(trained, "last")
    gates = nnx.merge(made.graph, made.of(1)[0]).head_gates()["decoder"]
    every = {f"decoder.{layer}.{head}" for layer, head in np.ndindex(gates.shape)}
    for order in ORDERS:
        rows = [r for r in found if (r["order"], r["draw"]) == (order, 0)]
        assert [row["removed"] for row in rows] == counts(len(every))
        for row in rows:
            assert len(row["gone"]) == row["removed"] and row["heads"] == len(every)
            assert set(row["gone"]) <= every and row["site"] == "decoder"


def test_a_corpus_without_val_is_refused_before_all_is_decoded(
    trained, evaluated, capfd, tmp_path
):
    """By --prune, which ranks heads on it."""
    workdir, folder = tmp_path / "run", tmp_path / "corpus"
    shutil.copytree(trained, workdir)
    write_corpus(folder, ["one"], ["eins"])
    for language in ("en", "de"):
        (folder / f"train.{language}").rename(folder / f"test.{language}")
        (folder / f"val.{language}").unlink(missing_ok=True)
    config = json.loads((workdir / "config.json").read_text())
    config["data"] |= {"name": "text", "directory": str(folder)}
    (workdir / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="2"):
        evaluated(workdir=workdir, split="test", prune=True, beam_size=1)
    assert "holds neither val.en and val.de nor" in capfd.readouterr().err
    assert not (workdir / "result-test.json").exists()


def test_a_run_translates_from_python(trained):
    made = load(trained)
    lines = ["seven", " ", "twenty-one"]
    found = made.translate(lines, trial=1, beam_size=2)
    ids = [ids.tolist() for ids in made.tokenizers[0].encode([lines[0], lines[2]])]
    params, gates = made.of(1)
    tokens, _ = translate(made.graph, params, ids, head_gates=gates, beam_size=2)
    first, second = made.tokenizers[1].decode_many(tokens)
    assert found == [first, "", second]
    with pytest.raises(TypeError, match=r"list of sentences, as in \['seven'\]"):
        made.translate("seven")
    with pytest.raises(ValueError, match="which must be one of best, last, average"):
        load(str(trained), "bets")
    every = sentences(made.tokenizers[0].encode(lines))  # as a split is scored
    model = made.graph, made.params, made.head_gates
    scored = translations(*model, every, [1], beam_size=2)[1]
    assert made.tokenizers[1].decode_many(scored) == found
    assert translations(*model, every[1:2], [0, 1]) == {0: [[]], 1: [[]]}
    lists = made.translate(lines, trial=1, beam_size=2, n_best=2)
    assert [some[0][0] for some in lists] == found and lists[1] == [("", 0.0)]
    assert all(first[1] > second[1] for first, second in (lists[0], lists[2]))
    scored = translations(*model, every, [1], beam_size=2, n_best=2)[1]
    decode = made.tokenizers[1].decode
    assert [[(decode(ids), p) for ids, p in some] for some in scored] == lists
    other = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("other",))
    jax.set_mesh(other)  # as by a run that is loaded later, on several devices
    assert made.translate(lines, trial=1, beam_size=2) == found
    assert jax.sharding.get_mesh() == made.mesh


def test_bad_input_to_eval_is_named(trained, tmp_path):
    refused(run(command("eval.py", workdir=tmp_path, split="val")), "holds no run")
    (tmp_path / "sweep.json").touch()
    with pytest.raises(FileNotFoundError, match="holds a sweep; its runs are .*groups"):
        load(tmp_path)
    heads = [*command("eval.py", workdir=tmp_path, heads=True), "--translate"]
    refused(run(heads), "--heads needs the references")
    ran = run(command("eval.py", workdir=trained, split="val,tset"))
    refused(ran, "tset")
    assert not ran.stdout, "it is said before the first split is decoded"
    ran = subprocess.run(
        [*command("eval.py", workdir=trained), "--translate"],
        cwd=ROOT,
        input=b"one\n\xff\xfe\n",
        capture_output=True,
    )
    assert ran.returncode == 2 and b"Line 2 of the input is not UTF-8" in ran.stderr
    ran = run(command("eval.py", workdir=trained, split="val", beam_size=2**16))
    refused(ran, "memory is exhausted", "--beam_size")
    unscored = tmp_path / "unscored"
    shutil.copytree(trained, unscored, ignore=shutil.ignore_patterns("60"))
    refused(run(command("eval.py", workdir=unscored, split="val")), "--checkpoint=last")
    empty = tmp_path / "empty"
    shutil.copytree(trained, empty, ignore=shutil.ignore_patterns("[0-9]*"))
    ran = run(command("eval.py", workdir=empty, split="val"))
    refused(ran, "holds no checkpoint")


def test_average_is_the_mean_of_the_kept_checkpoints(trained):
    got = load(trained, "average")
    checkpoints = Checkpoints(trained)
    assert len(checkpoints.steps()) == 5
    each = [checkpoints.read(s, "params", got.params) for s in checkpoints.steps()]
    checkpoints.close()
    for mean, *leaves in zip(*map(jax.tree.leaves, [got.params, *each]), strict=True):
        np.testing.assert_allclose(mean, np.mean(leaves, axis=0), rtol=1e-6, atol=1e-7)
