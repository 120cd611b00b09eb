"""Trials that are killed again and again end with the bits of those that aren't.

`make test-faults`; minutes, for every start of a real process takes seconds.
`HEADCOUNT_FAULTS=20 make test-faults` kills, signals and fills disks 20 times per test.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.processes import repeats
from tests.runs import (
    ROOT,
    arguments,
    checksums,
    fails,
    logged,
    run,
    start,
    status,
    succeed,
    training,
    write_corpus,
)

STEPS = 60 * max(3, repeats(4) // 2)  # enough to be killed so often
WORDS = ("dog", "cat", "sun", "man", "tree", "sea", "road", "hill")
PAIRS = [f"the {a} sees the {b}" for a in WORDS for b in WORDS]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), PAIRS, PAIRS[::-1])


@pytest.fixture(scope="module")
def settings(corpus):
    return corpus | {
        "data.batch_tokens": 256,
        "model.attention.dropout": 0.2,
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


def wait_for_moment(generator, process, workdir):
    """Wait for a random moment of a training; return what it was in."""
    kind = generator.choice(["start", "step", "step", "save", "save"])
    if kind == "start":
        time.sleep(generator.uniform(0, 5))
    else:
        size = file_size(workdir)
        wait_until(process, lambda: file_size(workdir) > size)
        time.sleep(generator.uniform(0, 0.05))
    if kind == "save":
        wait_until(process, lambda: saving(workdir))
    return kind


def same_run(ours, theirs, seed):
    """Check that two runs have the same bits, and that no row is lost or doubled."""
    assert checksums(ours, STEPS) == checksums(theirs, STEPS), f"seed {seed}"
    for here, there in zip(logged(ours), logged(theirs), strict=True):
        for name in (
            *("step", "trial", "loss", "dev_loss"),
            *("gradient_norm", "learning_rate"),
        ):
            assert here.get(name) == there.get(name), f"seed {seed}"


def test_killed_at_random_moments_and_in_saves(uninterrupted, settings, tmp_path):
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    kinds = []
    for _ in range(repeats(4)):
        process = start(training(workdir, **settings), stderr=subprocess.DEVNULL)
        kinds.append(wait_for_moment(generator, process, workdir))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, f"seed {seed}: it ended in {kinds}"
        if (workdir / "run.json").exists():
            assert status(workdir) == "running"
    succeed(training(workdir, **settings))
    same_run(uninterrupted, workdir, seed)


def test_a_language_model_killed_in_a_step_and_in_a_save(tmp_path):
    """Its windows are cut anew in every epoch, at an offset drawn from the seed."""
    for name in ("train", "val"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(PAIRS))
    keys = {
        "task.name": "language_model",
        "data.name": "text",
        "data.directory": tmp_path,
        "data.tokenizer": "characters",
        "data.max_length": 16,
        "data.batch_tokens": 128,
        "model.num_encoder_layers": 0,
        "model.dropout": 0.2,
        "train.num_steps": STEPS,
        "train.checkpoint_every_steps": 3,
    }
    alone, workdir = tmp_path / "alone", tmp_path / "run"
    succeed(training(alone, "configs/base.py", **keys))
    assert 10 * sum(map(len, PAIRS)) < 128 * STEPS, "many epochs"
    for happens in (lambda: file_size(workdir) > 2000, lambda: saving(workdir)):
        process = start(
            training(workdir, "configs/base.py", **keys), stderr=subprocess.DEVNULL
        )
        wait_until(process, happens)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert status(workdir) == "running"
    succeed(training(workdir, "configs/base.py", **keys))
    same_run(alone, workdir, seed=None)


def test_signals_to_the_group_at_random_moments(uninterrupted, settings, tmp_path):
    """Each stops it, after saving if it trains, once or again and again."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "run"
    for _ in range(repeats(1)):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            process = start(training(workdir, **settings), start_new_session=True)
            kind = wait_for_moment(generator, process, workdir)
            for _ in range(generator.choice([1, 3])):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                time.sleep(generator.uniform(0, 0.1))
            log = process.communicate(timeout=120)[1]
            # by itself, before any of our code could take the signal
            codes = {128 + number, -number if kind == "start" else 128 + number}
            assert process.returncode in codes, f"seed {seed}: {log}"
            assert "Traceback" not in log, f"seed {seed}: {log}"
            if saved := re.search(r"Saved step (\d+)", log):
                assert status(workdir) == "stopped", f"seed {seed}: {log}"
                assert signal.Signals(number).name in log, f"seed {seed}: {log}"
                assert checksums(workdir, int(saved[1])), f"seed {seed}: {log}"
    succeed(training(workdir, **settings))
    same_run(uninterrupted, workdir, seed)


def test_an_evaluation_killed_at_random_moments(uninterrupted, tmp_path):
    """The scores are the last ones or the new ones, never a part, and the same."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    flags = {"workdir": workdir, "split": "val", "beam_size": 1}
    args = arguments("eval.py", output=workdir / "SPLIT.txt", **flags)
    began = time.monotonic()
    succeed(args)
    seconds = time.monotonic() - began
    files = "result-val.json", "val-0.txt", "val-1.txt"
    wanted = {name: (workdir / name).read_bytes() for name in files}
    for _ in range(repeats(2)):
        for name in generator.sample(files, generator.randrange(len(files) + 1)):
            (workdir / name).unlink(missing_ok=True)
        process = start(args, stderr=subprocess.DEVNULL)
        time.sleep(generator.uniform(0, 2 + seconds))
        process.kill()
        process.wait()
        for name in files:
            if (workdir / name).exists():
                found = (workdir / name).read_bytes()
                assert found == wanted[name], f"seed {seed}: {name}"
    succeed(args)
    assert {name: (workdir / name).read_bytes() for name in files} == wanted
    assert checksums(workdir, STEPS) == checksums(uninterrupted, STEPS)


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


@pytest.mark.skipif(shutil.which("faketime") is None, reason="needs Debian's faketime")
def test_a_clock_that_is_set_back_between_two_starts(settings, tmp_path):
    """The checkpoints of before are then of the future; the last is still the last.

    Half a minute, for libfaketime slows down every lock; CI does not install it.
    """
    short = settings | {"train.num_steps": 12, "train.eval_every_steps": 6}
    workdir, plain = tmp_path / "run", tmp_path / "plain"
    succeed(training(workdir, **short | {"train.num_steps": 7}))
    command = ["faketime", "-f", "-400d", sys.executable, *training(workdir, **short)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "from step 7" in ran.stderr
    succeed(training(plain, **short))
    assert checksums(workdir, 12) == checksums(plain, 12)


@pytest.fixture
def small_disk(tmp_path):
    """Return a function that mounts a file system of some kB, or makes it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(kilobytes):
        """Give it another size, and return it."""
        options = f"size={kilobytes}k" + (",remount" if folder.is_mount() else "")
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True
        )
        return folder

    try:
        resize(4)
        resize.folder = folder
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the permission to mount a file system")
    yield resize
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_is_full(uninterrupted, settings, small_disk):
    """At random sizes, each larger than the last, until the run fits."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    used = sum(f.stat().st_blocks // 2 for f in uninterrupted.rglob("*") if f.is_file())
    sizes = sorted(int(used * generator.uniform(0.01, 0.6)) for _ in range(repeats(2)))
    for size in sizes:
        workdir = small_disk(size) / "run"
        kept = newest(workdir)
        ran = run(training(workdir, **settings))
        told = f"seed {seed}: {size} of {used} kB"
        assert "space" in fails(ran, small_disk.folder), told
        assert newest(workdir) >= kept, told
    small_disk(4 * used)
    succeed(training(workdir, **settings))
    same_run(uninterrupted, workdir, seed)


def newest(workdir):
    """Return the step of the last checkpoint; 0 if there is none."""
    steps = (path.name for path in workdir.glob("checkpoints/*"))
    return max((int(name) for name in steps if name.isdigit()), default=0)


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
