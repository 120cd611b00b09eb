"""What tests of whole sweeps share: a corpus, the command, what a sweep leaves."""

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ("dog", "cat", "sun", "man", "tree", "sea")
SENTENCES = [f"the {a} and the {b}" for a in WORDS for b in WORDS if a != b]
SMALL = {
    "data.name": "text",
    "data.vocab_size": 60,
    "data.batch_tokens": 256,
    "data.max_length": 12,
    "model.width": 16,
    "model.mlp_dim": 16,
    "model.num_encoder_layers": 1,
    "model.num_decoder_layers": 1,
    "optimizer.warmup_steps": 20,
    "train.num_steps": 60,
    "train.log_every_steps": 1,
    "train.eval_every_steps": 30,
    "train.checkpoint_every_steps": 10,
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
    """What becomes of an arm that cannot train?

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


def sweep(verb, workdir, corpus, *flags, ablation="two"):
    settings = SMALL | {"data.directory": corpus}
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
    return subprocess.Popen(
        args,
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that all its processes can be killed at once
    )


def finish(args, code=0):
    process = start(args)
    said = process.communicate(timeout=500)[0]
    assert process.returncode == code, said
    return said


def rows(workdir):
    database = sqlite3.connect(workdir / "sweep.sqlite")
    database.row_factory = sqlite3.Row
    found = [dict(row) for row in database.execute("SELECT * FROM trials")]
    database.close()
    return found


def started(workdir):
    """The commands that every group has run, in order: train, then the splits."""
    found = {}
    for log in sorted((workdir / "groups").glob("*/log.txt")):
        commands = [x for x in log.read_text().splitlines() if x.startswith("$ ")]
        found[log.parent.name] = [
            "train" if "train.py" in x else x.split("--split=")[1].split()[0]
            for x in commands
        ]
    return found


def metrics(workdir):
    """Steps and losses of every group; two processes at one would double them."""
    return {
        path.parent.name: [
            (m["step"], m["trial"], m.get("loss"), m.get("dev_loss"))
            for m in map(json.loads, path.read_text().splitlines())
        ]
        for path in sorted((workdir / "groups").glob("*/metrics.jsonl"))
    }
