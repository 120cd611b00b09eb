"""Signals to a process group, full disks and kills at random moments: nothing is lost.

`make test-faults`; minutes. Moments are random; a failure prints their seed.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import time

import pytest

from tests.faults.test_kills import PAIRS, file_size, wait_until
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

STEPS = 120
COMPARED = ("step", "trial", "loss", "dev_loss")


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), PAIRS, PAIRS[::-1])
    return corpus | {
        "data.batch_tokens": 256,
        "train.num_steps": STEPS,
        "train.checkpoint_every_steps": 20,
        "train.eval_every_steps": 60,
        "train.log_every_steps": 1,
    }


@pytest.fixture(scope="module")
def uninterrupted(settings, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "run"
    succeed(training(workdir, **settings))
    return workdir


def same_as(uninterrupted, workdir, seed):
    """Assert that nothing is lost, doubled or different."""
    assert checksums(workdir, STEPS) == checksums(uninterrupted, STEPS), f"seed {seed}"
    for ours, theirs in zip(logged(workdir), logged(uninterrupted), strict=True):
        found = [(row.get(name) for name in COMPARED) for row in (ours, theirs)]
        assert [*found[0]] == [*found[1]], f"seed {seed}"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_signals_to_the_group_of_a_training_lose_nothing(
    uninterrupted, settings, tmp_path, name
):
    """Also when each comes several times, as from a scheduler and a parent."""
    seed, number = random.randrange(10**6), getattr(signal, name)
    generator, workdir = random.Random(seed), tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not ignored by children
    try:
        for _ in range(10):
            process = start(training(workdir, **settings), start_new_session=True)
            size = file_size(workdir)
            wait_until(process, lambda size=size: file_size(workdir) > size)
            time.sleep(generator.uniform(0, 0.2))
            for _ in range(generator.randint(1, 3)):
                if process.poll() is None:
                    os.killpg(process.pid, number)
                time.sleep(generator.uniform(0, 0.05))
            log = process.communicate(timeout=120)[1]
            if process.returncode == 0:
                break  # it had just ended
            assert process.returncode == 128 + number, f"seed {seed}: {log}"
            assert status(workdir) == "stopped", f"seed {seed}"
            last = logged(workdir)[-1]["step"]
            assert (workdir / "checkpoints" / str(last)).exists(), f"seed {seed}"
    finally:
        signal.signal(signal.SIGHUP, before)
    succeed(training(workdir, **settings))
    same_as(uninterrupted, workdir, seed)


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"


def test_a_disk_that_is_full_at_any_size_loses_nothing(
    uninterrupted, settings, tmp_path
):
    """Files that can't grow past a limit are to the writer the same as a full disk."""
    workdir, failed = tmp_path / "run", 0
    for size in (0, 10, 100, 500, 1000, 2000, 4000, 8000, 16_000, 32_000):
        ran = run(training(workdir, **settings), before=LIMIT.format(size))
        if ran.returncode:
            failed += 1
            fails(ran)
        assert not list(workdir.glob("*.part")), size
    assert failed >= 5
    succeed(training(workdir, **settings))
    same_as(uninterrupted, workdir, "none")


def test_evaluation_killed_at_random_moments_leaves_whole_files(
    uninterrupted, tmp_path
):
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    args = arguments("eval.py", workdir=workdir, split="val", beam_size=1)
    args.append(f"--output={workdir / 'SPLIT.txt'}")
    begun = time.monotonic()
    succeed(args)
    seconds = time.monotonic() - begun
    wanted = read(workdir, "result-val.json")
    (workdir / "result-val.json").unlink()
    for _ in range(5):
        process = start(args, stderr=subprocess.DEVNULL)
        time.sleep(generator.uniform(0, 3 * seconds))
        process.kill()
        process.wait()
        if (workdir / "result-val.json").exists():
            assert read(workdir, "result-val.json") == wanted, f"seed {seed}"
    succeed(args)
    assert read(workdir, "result-val.json") == wanted, f"seed {seed}"
    assert status(workdir) == "finished"


FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


@pytest.mark.skipif(not os.path.exists(FAKETIME), reason="needs Debian's libfaketime")
def test_a_clock_that_is_set_back_between_starts_loses_nothing(
    uninterrupted, settings, tmp_path
):
    """The real clock of the process, unlike in test_kills."""
    workdir = tmp_path / "run"
    for steps, clock in ((40, "+2d"), (80, "-3d"), (STEPS, "-1y")):
        fake = os.environ | {"LD_PRELOAD": FAKETIME, "FAKETIME": clock}
        fake["DONT_FAKE_MONOTONIC"] = "1"
        process = start(
            training(workdir, **settings | {"train.num_steps": steps}), env=fake
        )
        log = process.communicate(timeout=300)[1]
        assert process.returncode == 0, log
    assert checksums(workdir, STEPS) == checksums(uninterrupted, STEPS)
    assert json.loads((workdir / "run.json").read_text())["status"] == "finished"
