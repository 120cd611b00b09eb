"""Trials that are killed again and again end with the bits of those that aren't.

`make test-faults`; minutes, for every start of a real process takes seconds.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.test_train import (
    ROOT,
    final,
    refused,
    rows,
    run,
    train_command,
    write_corpus,
)

STEPS, KILLS = 300, 20
WORDS = ("dog", "cat", "sun", "man", "tree", "sea", "road", "hill")
PAIRS = [f"the {a} sees the {b}" for a in WORDS for b in WORDS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), PAIRS, PAIRS[::-1])


@pytest.fixture(scope="module")
def settings(corpus):
    return corpus | {
        "data.batch_tokens": 256,
        "train.num_steps": STEPS,
        "train.checkpoint_every_steps": 3,
        "train.eval_every_steps": 60,
        "train.log_every_steps": 1,
    }


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    ran = run(train_command(workdir, **settings))
    assert ran.returncode == 0, ran.stderr
    return workdir


def wait_until(process, happens):
    """Poll often; give up where the process ends."""
    while process.poll() is None and not happens():
        time.sleep(0.0005)


def saving(workdir):
    """Whether a checkpoint is on its way."""
    folder = workdir / "checkpoints"
    return folder.exists() and any("tmp" in path.name for path in folder.iterdir())


def test_killed_at_random_moments_and_in_saves(undisturbed, settings, tmp_path):
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    killed = {"start": 0, "step": 0, "save": 0}
    while sum(killed.values()) < KILLS:
        process = subprocess.Popen(
            train_command(workdir, **settings),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        kind = generator.choice(["start", "step", "step", "save", "save"])
        if kind == "start":
            time.sleep(generator.uniform(0, 5))
        else:
            size = file_size(workdir)
            wait_until(process, lambda size=size: file_size(workdir) > size)
            time.sleep(generator.uniform(0, 0.05))
        if kind == "save":
            wait_until(process, lambda: saving(workdir))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"{killed} of seed {seed}: it ended"
        killed[kind] += 1
    ran = run(train_command(workdir, **settings))
    assert ran.returncode == 0, ran.stderr
    assert final(workdir, STEPS) == final(undisturbed, STEPS), f"seed {seed}"
    for ours, theirs in zip(rows(workdir), rows(undisturbed), strict=True):
        for name in ("step", "trial", "loss", "dev_loss"):
            assert ours.get(name) == theirs.get(name), f"seed {seed}"


def file_size(workdir):
    path = workdir / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


# A clock that is set a day forward, and back, every half second.
JUMPING = """
import runpy, sys, time
now = time.time
time.time = lambda: now() + 86400 * (int(2 * time.monotonic()) % 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_clock_that_jumps_loses_nothing(settings, tmp_path):
    """Amid a save it may end the run, with a sentence; the next start goes on."""
    short = settings | {"train.num_steps": 12, "train.eval_every_steps": 12}
    workdir = tmp_path / "run"
    _, *args = train_command(workdir, **short)
    environment = os.environ | {"PYTHONPATH": "."}
    ran = run([sys.executable, "-c", JUMPING, *args], env=environment)
    if ran.returncode:
        assert ran.returncode == 2 and "Traceback" not in ran.stderr, ran.stderr
        assert "timed out" in ran.stderr and "Run the same command" in ran.stderr
        ran = run(train_command(workdir, **short))
    assert ran.returncode == 0, ran.stderr
    logged = [row for row in rows(workdir)[2:] if "loss" in row]
    assert min(row.get("steps_per_second", 1) for row in logged) > 0
    assert run(train_command(tmp_path / "plain", **short)).returncode == 0
    assert final(workdir, 12) == final(tmp_path / "plain", 12)


def test_data_that_vanish_or_shrink_are_named_and_nothing_is_lost(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", PAIRS, PAIRS[::-1])
    short = corpus | {"train.num_steps": 5, "train.eval_every_steps": 5}
    workdir, longer = tmp_path / "run", short | {"train.num_steps": 10}
    assert run(train_command(workdir, **short)).returncode == 0
    before = final(workdir, 5)
    source = tmp_path / "corpus" / "train.en"
    text = source.read_text()

    source.unlink()
    refused(run(train_command(workdir, **longer)), "train")
    source.write_text(text[: len(text) // 2])
    refused(run(train_command(workdir, **longer)), "train.en", "64")
    source.write_text(text.replace("dog", "cow"))
    refused(run(train_command(workdir, **longer)), "training data are not those")
    assert final(workdir, 5) == before
    source.write_text(text)
    assert run(train_command(workdir, **longer)).returncode == 0


def test_data_that_vanish_while_it_trains_do_not_stop_it(settings, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", PAIRS, PAIRS[::-1])
    workdir = tmp_path / "run"
    process = subprocess.Popen(
        train_command(workdir, **settings | corpus), cwd=ROOT, stderr=subprocess.DEVNULL
    )
    wait_until(process, lambda: file_size(workdir) > 0)
    assert process.poll() is None
    shutil.rmtree(tmp_path / "corpus")
    assert process.wait() == 0
