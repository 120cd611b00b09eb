"""Command lines that train and score a small model, and what a workdir then has."""

import contextlib
import fcntl
import json
import subprocess
import sys
from pathlib import Path

from tests.forkserver import ForkServer

ROOT = Path(__file__).resolve().parent.parent
SERVER = ForkServer()
SMALL = {
    "data.vocab_size": 80,
    "data.batch_tokens": 512,
    "data.max_decode_length": 16,  # what has learned little does not end
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


def arguments(script: str, *words, **flags) -> list[str]:
    """Return a command line of a script; a flag that is None is left out."""
    given = {name: value for name, value in flags.items() if value is not None}
    return [script, *words, *(f"--{name}={value}" for name, value in given.items())]


def training(workdir, config="configs/numbers.py", **overrides) -> list[str]:
    """Return a command line that trains two trials of a small model."""
    settings = {f"config.{key}": value for key, value in (SMALL | overrides).items()}
    return arguments("train.py", config=config, workdir=workdir, **settings)


def run(args: list[str], **options) -> subprocess.CompletedProcess:
    """Run a script to its end; see `ForkServer.run` for the options."""
    return SERVER.run(args, **options)


def succeed(args: list[str], **options) -> subprocess.CompletedProcess:
    """Run a script that must exit with 0."""
    ran = run(args, **options)
    assert ran.returncode == 0, ran.stderr
    return ran


def start(args: list[str], **options) -> subprocess.Popen:
    """Start a script in a process of its own, which reports to a pipe."""
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} | options
    return subprocess.Popen([sys.executable, *args], cwd=ROOT, text=True, **options)


def fails(ran: subprocess.CompletedProcess, *culprits) -> str:
    """Check that a script exited with 2 and one line that names the culprits."""
    assert ran.returncode == 2, ran.stderr
    assert "Traceback" not in ran.stderr
    line = ran.stderr.strip().splitlines()[-1]
    assert line.startswith(f"{ran.args[0]}: "), ran.stderr
    for culprit in culprits:
        assert str(culprit) in line
    return line


def checksums(workdir: Path, step: int = 60) -> dict:
    """Return the checksum of every array of a checkpoint, by item."""
    path = workdir / "checkpoints" / str(step) / "checksums" / "metadata"
    return json.loads(path.read_text())


def logged(workdir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl."""
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def read(workdir: Path, name: str):
    """Return the content of a JSON file in a workdir."""
    return json.loads((workdir / name).read_text())


def status(workdir: Path) -> str:
    """Return the status in run.json."""
    return read(workdir, "run.json")["status"]


def write_corpus(folder: Path, source, target, held_out: int | None = None) -> dict:
    """Write a corpus whose val is the start of its train; return its config keys."""
    folder.mkdir(exist_ok=True)
    for language, texts in (("en", source), ("de", target)):
        lines = [f"{text}\n" for text in texts]
        (folder / f"train.{language}").write_text("".join(lines))
        (folder / f"val.{language}").write_text("".join(lines[:held_out]))
    return text_keys(folder)


def text_keys(folder: Path) -> dict:
    """Return the config keys of a corpus in text files, with all usual metrics."""
    metrics = "exact_match,bleu,chrf"
    return {"data.name": "text", "data.directory": folder, "task.metrics": metrics}


@contextlib.contextmanager
def exclusively(path: Path):
    """Hold a lock, after waiting for other processes of the test session."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
