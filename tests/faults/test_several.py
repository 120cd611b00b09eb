"""Several processes on this machine that train one run, and what ends some of them.

`make test-faults`; minutes, for every start compiles in each process.
"""

import json
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.faults.test_kills import PAIRS, wait_until
from tests.processes import FAST, ROOT, free_address, with_devices
from tests.runs import checksums, logged, training, write_corpus

STEPS = 20


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp("corpus"), PAIRS, PAIRS[::-1])
    return corpus | {
        "data.batch_tokens": 256,
        "model.mlp_dim": 1024,  # enough for mesh.shard to divide it
        # The gradient jumps where a relu's input changes its sign. Parameters rounded
        # otherwise before each of 24 steps (by a bit at random, 12 times 2 trials, one
        # process) moved its norm by up to 8.5e-5 with relu, with gelu by 1.2e-6.
        "model.activation": "gelu",
        "train.num_steps": STEPS,
        "train.eval_every_steps": STEPS // 2,
        "train.checkpoint_every_steps": 2,
    }


def start(workdir, processes, devices=1, own=None, seconds=60, **settings):
    """The processes of a run; `own` is what the last one is told otherwise."""
    address = free_address()
    started = []
    for index in range(processes):
        told = settings | ((own or {}) if index == processes - 1 else {})
        command = [sys.executable, *training(told.pop("workdir", workdir), **told)]
        if processes > 1:
            command += [f"--coordinator={address}", f"--num_processes={processes}"]
            command += [f"--process_id={index}", f"--coordinator_timeout={seconds}"]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=with_devices(devices, FAST),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def ended(started, wanted=0):
    """What they said, once all have ended."""
    said = [process.communicate(timeout=300)[1] for process in started]
    for process, text in zip(started, said, strict=True):
        assert process.returncode == wanted, text
    return said


@pytest.fixture(scope="module")
def alone(settings, tmp_path_factory):
    """The workdir of one process with one device."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    ended(start(workdir, 1, **settings))
    return workdir


@pytest.fixture(scope="module")
def two(settings, tmp_path_factory):
    """The workdir of two processes with a device each, trial by trial."""
    workdir = tmp_path_factory.mktemp("two") / "run"
    first, second = ended(start(workdir, 2, **settings))
    assert "2 processes with 2 devices" in first and "Trained 20 steps" in first
    assert "Trained" not in second and "dev_loss" not in second
    return workdir


def same_training(ours, theirs):
    """Equal rows to float tolerance, and in the same order."""
    for here, there in zip(logged(ours), logged(theirs), strict=True):
        assert here.keys() == there.keys()
        assert (here["step"], here["trial"]) == (there["step"], there["trial"])
        for name in ("loss", "gradient_norm", "dev_loss", "dev_bleu"):
            if name in here:
                np.testing.assert_allclose(here[name], there[name], rtol=2e-5)


def test_two_processes_train_as_one_does(alone, two):
    same_training(two, alone)
    assert json.loads((two / "run.json").read_text())["processes"] == 2
    assert len(list(two.glob("events.*"))) == 1, "only one process writes"
    written = two / "checkpoints" / str(STEPS) / "params"
    assert {p.name for p in written.glob("ocdbt.process_*")} == {
        "ocdbt.process_0",
        "ocdbt.process_1",
    }


def test_four_processes_share_trials_and_logged(settings, alone, tmp_path):
    workdir = tmp_path / "run"
    said = ended(start(workdir, 4, **settings))
    assert "4 processes with 4 devices" in said[0]
    same_training(workdir, alone)
    recorded = json.loads((workdir / "run.json").read_text())
    assert recorded["mesh"] == {"trial": 2, "data": 2, "model": 1}


def test_a_checkpoint_goes_on_with_other_processes(settings, alone, two, tmp_path):
    """From two to one, and from one to two of four devices with all three axes."""
    longer = settings | {"train.num_steps": STEPS + 4}
    to_one, to_two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(two, to_one)
    shutil.copytree(alone, to_two)
    (said,) = ended(start(to_one, 1, **longer))
    assert f"from step {STEPS}" in said
    mesh = {"mesh.trial": 1, "mesh.data": 4, "mesh.model": 2}
    mesh["mesh.shard"] = "parameters"
    said = ended(start(to_two, 2, devices=4, **longer | mesh))
    assert "2 processes with 8 devices" in said[0]
    assert f"from step {STEPS}" in said[0]
    same_training(to_two, to_one)
    parts = checksums(to_two, STEPS + 4)["params"]
    assert len([key for key in parts if key.endswith("512:1024]")]) > 0, "divided"


@pytest.mark.parametrize(
    "step, index, number",
    [(9, 0, signal.SIGKILL), (14, 1, signal.SIGKILL), (4, 1, signal.SIGTERM)],
)
def test_whoever_is_stopped_all_stop_and_go_on_bit_for_bit(
    settings, two, tmp_path, step, index, number
):
    workdir = tmp_path / "run"
    both = start(workdir, 2, **settings)
    wait_until(both[0], lambda: reached(workdir, step))
    both[index].send_signal(number)
    at = time.monotonic()
    if number == signal.SIGTERM:
        assert "Saved step" in ended(both, 128 + number)[0]
    else:
        other = both[1 - index]
        said = other.communicate(timeout=60)[1]
        assert time.monotonic() - at < 60
        assert other.returncode == 1, said
        assert "process" in said.splitlines()[-1]
        both[index].communicate()
    assert not (workdir / "checkpoints" / str(STEPS)).exists(), "it ended before"
    ended(start(workdir, 2, **settings))
    assert checksums(workdir, STEPS) == checksums(two, STEPS)


def reached(workdir, step):
    """Whether a step is logged."""
    path = workdir / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text()


def test_what_one_process_cannot_do_all_say(settings, tmp_path):
    dev = tmp_path / "dev"
    shutil.copytree(settings["data.directory"], dev)
    (dev / "val.de").write_text("ein Hund\n" * len(PAIRS))
    for own, parts in (
        ({"model.width": 32}, ["model.width", "here 32"]),
        ({"workdir": tmp_path / "other"}, ["--workdir"]),
        ({"data.directory": "nowhere"}, ["nowhere"]),
        ({"data.directory": dev}, ["dev_crc32"]),
        ({"model.norm": "both"}, ["model.norm", "'both'"]),
    ):
        for said in ended(start(tmp_path / "run", 2, own=own, **settings), wanted=2):
            for part in parts:
                assert part in said.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_processes_that_do_not_come_are_not_waited_for_long(settings, tmp_path):
    said = []
    for index in range(2):
        both = start(tmp_path / "run", 2, seconds=5, **settings)
        both[1 - index].kill()
        both[1 - index].communicate()
        said += ended([both[index]], wanted=2)
    assert "process" in said[0].splitlines()[-1]
    assert "localhost" in said[1].splitlines()[-1]


MANY = """
import sys
import jax
import numpy as np
from headcount.runtime import distributed, sharding
distributed.connect(sys.argv[1], 2, int(sys.argv[2]), 60)
mesh = sharding.make_mesh({"trial": 8, "data": 1, "model": 1}, 8, 1)
jax.set_mesh(mesh)
ones, where = np.ones((8, 64), np.float32), sharding.named(mesh, "trial")
tree = {str(i): sharding.put(i * ones, where) for i in range(24)}
double = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))
whole = sharding.to_all(tree)
for step in range(40):
    tree = double(tree)
    before, whole = whole, sharding.to_all(tree)
    for name, array in before.items():  # one late, as train.py reads its metrics
        np.testing.assert_array_equal(np.asarray(array), 2**step * int(name) * ones)
distributed.leave()
"""


def test_many_arrays_reach_all_processes(tmp_path):
    """All at once, two processes of four devices waited for each other in 3 of 3."""
    address = free_address()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MANY, address, str(index)],
            cwd=ROOT,
            env=with_devices(4, FAST),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        ended(started)
    finally:
        for process in started:
            process.kill()
