"""What tests of whole sweeps share: a corpus, commands, and what a sweep leaves."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ("dog", "cat", "sun", "man", "tree", "sea")
SENTENCES = [f"the {a} and the {b}" for a in WORDS for b in WORDS if a != b]
# A language model compiles half as long as a translator, which also has to decode.
SMALL = {
    "task.name": "language_model",
    "data.name": "text",
    "data.tokenizer": "characters",
    "data.vocab_size": 60,
    "data.batch_tokens": 256,
    "data.max_length": 12,
    "model.width": 16,
    "model.mlp_dim": 16,
    "model.num_encoder_layers": 0,
    "model.num_decoder_layers": 1,
    "optimizer.warmup_steps": 20,
    "train.num_steps": 60,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 30,
    "train.checkpoint_every_steps": 10,
    "train.best_metric": "bits_per_byte",
}
TRANSLATION = {
    "task.name": "translation",
    "data.tokenizer": "sentencepiece",
    "data.max_decode_length": 16,
    "model.num_encoder_layers": 1,
    "train.best_metric": "bleu",
}
ABLATIONS = '''
"""Ablations of a test."""


def two(base):
    """One head or two?

    Scientific: model.attention.num_heads.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    for heads in (1, 2):
        yield {"model.attention.num_heads": heads}


def broken(base):
    """What if an arm cannot train?

    Scientific: data.max_length.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    for length in (12, 1):
        yield {"data.max_length": length}


def smoothing(base):
    """Does label smoothing help?

    Scientific: optimizer.label_smoothing.
    Nuisance: optimizer.learning_rate.
    Fixed: the rest.
    """
    for share in (0.0, 0.2):
        yield {"optimizer.label_smoothing": share}


def warmup(base):
    """One head or two, each with its own warm-up?

    Scientific: model.attention.num_heads.
    Nuisance: optimizer.warmup_steps.
    Fixed: the rest.
    """
    yield from two(base)
'''


def sweep(verb, workdir, corpus, *flags, ablation="two", **changes):
    """Return a command of sweep.py."""
    settings = SMALL | {"data.directory": corpus} | changes
    return [
        sys.executable,
        "sweep.py",
        verb,
        "--config=configs/base.py",
        *(f"--config.{key}={value}" for key, value in settings.items()),
        f"--ablation={corpus / 'ablations.py'}:{ablation}",
        "--seeds=2",
        f"--workdir={workdir}",
        *flags,
    ]


def start(args):
    """Start a command as a process group of its own."""
    return subprocess.Popen(
        args,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(args, code=0):
    """Run a command to its end; return what it printed."""
    return end(start(args), code)


def end(process, code=0):
    """Wait for a process; return what it printed."""
    printed = process.communicate(timeout=500)[0]
    assert process.returncode == code, printed
    return printed


def wait_for(happened, process, seconds=300):
    """Wait until something happened, while a process runs."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


def train_pid(workdir):
    """Return the id of a train.py in a sweep's workdir; None if there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has just ended
            continue
        if "train.py" in line and str(workdir) in line:
            return int(path.parent.name)
    return None


def kill(process, number=signal.SIGKILL):
    """Send a signal to the process group of a sweep, and wait for its end."""
    os.killpg(process.pid, number)
    process.communicate()


def rows(workdir):
    """Read the table."""
    database = sqlite3.connect(workdir / "sweep.sqlite")
    database.row_factory = sqlite3.Row
    found = [dict(row) for row in database.execute("SELECT * FROM trials")]
    database.close()
    return found


def started(workdir):
    """Return the commands that every group ran, in order: train, then the splits."""
    found = {}
    for log in sorted((workdir / "groups").glob("*/log.txt")):
        commands = [x for x in log.read_text().splitlines() if x.startswith("$ ")]
        found[log.parent.name] = [
            "train" if "train.py" in x else x.split("--split=")[1].split()[0]
            for x in commands
        ]
    return found


def metrics(workdir):
    """Return the metrics of every group; two processes at once would double them."""
    return {
        path.parent.name: [
            (m["step"], m["trial"], m.get("loss"), m.get("dev_loss"))
            for m in map(json.loads, path.read_text().splitlines())
        ]
        for path in sorted((workdir / "groups").glob("*/metrics.jsonl"))
    }


def scores(workdir):
    """Return what the table says of every trial, except what depends on the time."""
    columns = ("id", "arm", "seed", "status", "steps", "dev_bits_per_byte", "test_loss")
    return sorted(tuple(row[c] for c in columns) for row in rows(workdir))


def processes(*parts):
    """Return the ids of processes whose command line has all parts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(part in line for part in parts):
                found.append(int(path.parent.name))
    return found


def parent(process):
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[1])
