"""Trials that are killed again and again end with the bits of those that aren't.

`make test-faults`; minutes, for every start of a real process takes seconds.
"""

import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.runs import (
    checksums,
    fails,
    logged,
    run,
    start,
    succeed,
    training,
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
def uninterrupted(settings, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    succeed(training(workdir, **settings))
    return workdir


def wait_until(process, happens):
    """Poll often; give up where the process ends."""
    while process.poll() is None and not happens():
        time.sleep(0.0005)


def saving(workdir):
    """Whether a checkpoint is on its way."""
    folder = workdir / "checkpoints"
    return folder.exists() and any("tmp" in path.name for path in folder.iterdir())


def test_killed_at_random_moments_and_in_saves(uninterrupted, settings, tmp_path):
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    killed = {"start": 0, "step": 0, "save": 0}
    while sum(killed.values()) < KILLS:
        process = start(training(workdir, **settings), stderr=subprocess.DEVNULL)
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
    succeed(training(workdir, **settings))
    assert checksums(workdir, STEPS) == checksums(uninterrupted, STEPS), f"seed {seed}"
    for ours, theirs in zip(logged(workdir), logged(uninterrupted), strict=True):
        for name in ("step", "trial", "loss", "dev_loss"):
            assert ours.get(name) == theirs.get(name), f"seed {seed}"


def file_size(workdir):
    path = workdir / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


# A clock that is set a day forward, and back, every half second.
JUMPING = """
import time
now = time.time
time.time = lambda: now() + 86400 * (int(2 * time.monotonic()) % 2)
"""


def test_a_clock_that_jumps_loses_nothing(settings, tmp_path):
    """In the middle of a save it may end the run; the next start resumes."""
    short = settings | {"train.num_steps": 12, "train.eval_every_steps": 12}
    workdir = tmp_path / "run"
    ran = run(training(workdir, **short), before=JUMPING)
    if ran.returncode:
        fails(ran)
        succeed(training(workdir, **short))
    found = [row for row in logged(workdir)[2:] if "loss" in row]
    assert min(row.get("steps_per_second", 1) for row in found) > 0
    succeed(training(tmp_path / "plain", **short))
    assert checksums(workdir, 12) == checksums(tmp_path / "plain", 12)


def test_data_that_vanish_or_shrink_are_named_and_nothing_is_lost(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", PAIRS, PAIRS[::-1])
    short = corpus | {"train.num_steps": 5, "train.eval_every_steps": 5}
    workdir, longer = tmp_path / "run", short | {"train.num_steps": 10}
    succeed(training(workdir, **short))
    before = checksums(workdir, 5)
    source = tmp_path / "corpus" / "train.en"
    text = source.read_text()

    source.unlink()
    fails(run(training(workdir, **longer)), "train")
    source.write_text(text[: len(text) // 2])
    fails(run(training(workdir, **longer)), "train.en", "64")
    source.write_text(text.replace("dog", "cow"))
    fails(run(training(workdir, **longer)), workdir)
    assert checksums(workdir, 5) == before
    source.write_text(text)
    succeed(training(workdir, **longer))


def test_data_that_vanish_while_it_trains_do_not_stop_it(settings, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", PAIRS, PAIRS[::-1])
    workdir = tmp_path / "run"
    process = start(training(workdir, **settings | corpus), stderr=subprocess.DEVNULL)
    wait_until(process, lambda: file_size(workdir) > 0)
    assert process.poll() is None
    shutil.rmtree(tmp_path / "corpus")
    assert process.wait() == 0
