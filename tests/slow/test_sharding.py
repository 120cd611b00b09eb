"""A mesh changes where a step is computed, and nothing else."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from headcount.configs.base import get_config
from headcount.configs.commandline import flat
from headcount.runtime.sharding import make_mesh, specs, warn_of_undivided
from tests.processes import FAST, ROOT, free_address, with_devices

RUNS = [
    (2, {}),
    (2, {"trial": 2, "data": 2, "model": 2, "shard": "parameters"}),
    (2, {"trial": 1, "data": 8, "shard": "optimizer"}),
]
IN_PARTS = [
    (2, {"accumulate_steps": 2}),
    (2, {"trial": 2, "data": 4, "accumulate_steps": 2}),
]


def start(devices, runs, *hosts, module="sharded_steps"):
    """A process that trains a few steps on so many devices."""
    return subprocess.Popen(
        [sys.executable, "-m", f"tests.{module}", json.dumps(runs), *hosts],
        cwd=ROOT,
        env=with_devices(devices, FAST),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def found(process):
    """What it printed last."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def eight():
    """Of a process with eight devices."""
    return found(start(8, RUNS + IN_PARTS))


def test_two_processes_of_four_devices_compute_what_one_device_does(eight):
    address = free_address()
    both = [start(4, RUNS[1:2], address, "2", str(i)) for i in range(2)]
    first, second = [found(process)[0] for process in both]
    assert first == second
    assert first["compiling"] == 0  # `begin` has compiled just what the step needs
    np.testing.assert_allclose(first["loss"], eight[0]["loss"], rtol=2e-5)
    specs_of_state = " ".join(first["specs"])
    assert "'data'" in specs_of_state and "'model'" in specs_of_state


def test_eight_devices_compute_what_one_does(eight):
    one, *others = eight[: len(RUNS)]
    assert np.shape(one["loss"]) == (2, 4) and np.isfinite(one["loss"]).all()
    assert one["loss"][0] != one["loss"][1]
    for other in others:
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-5)
    # divided it was, and stayed
    specs_of_state = [" ".join(other["specs"]) for other in others]
    assert "'data'" in specs_of_state[0] and "'model'" in specs_of_state[0]
    assert "'data'" in specs_of_state[1] and "'model'" not in specs_of_state[1]


def test_eight_devices_add_up_parts_of_a_batch_as_one_does(eight):
    """Every device has rows of each part, or there would be nothing to share."""
    one, other = eight[len(RUNS) :]
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-5)
    assert one["loss"] != eight[0]["loss"]  # dropout drops other elements


def test_any_mesh_translates_as_one_device_does():
    """A trial after the other, as on CPUs, and all in step, as on accelerators."""
    meshes = [{"trial": 1, "data": 1}, {"trial": 4, "data": 2}, {"trial": 2, "data": 2}]
    shapes = [mesh | {"model": 1} for mesh in meshes]
    printed = found(start(8, shapes, module="sharded_decoding"))
    one, *others = printed["translations"]
    assert one[3] == one[1]  # that trial alone
    assert len({str(translation) for trial in one for translation in trial}) > 10
    assert len(others) == 5 and all(other == one for other in others)
    assert printed["moved"] == [{}, {}], "each device decodes on its own"


class Device:
    """Stands for one in a mesh."""

    platform = device_kind = "cpu"
    process_index = 0

    def __init__(self, index):
        self.id = index


@pytest.mark.parametrize(
    "count, trials, shape, wanted",
    [
        (1, 16, {}, (1, 1, 1)),
        (8, 1, {}, (1, 8, 1)),
        (8, 16, {}, (8, 1, 1)),
        (8, 6, {}, (2, 4, 1)),
        (8, 4, {"model": 2}, (4, 1, 2)),
        (8, 4, {"trial": 2}, (2, 4, 1)),
        (8, 4, {"trial": -1, "data": 2}, (4, 2, 1)),
        (8, 16, {"trial": -1}, (8, 1, 1)),
    ],
)
def test_a_mesh_is_of_trials_first(count, trials, shape, wanted):
    devices = [Device(i) for i in range(count)]
    shape = {"trial": None, "data": -1, "model": 1} | shape
    mesh = make_mesh(shape, trials, 8, devices)
    assert tuple(mesh.shape.values()) == wanted
    assert mesh.axis_names == ("trial", "data", "model")


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"trial": 3, "data": 1}, "does not make the 8 devices"),
        ({"model": -1}, "one may be -1"),
        ({"model": 0}, "at least 1"),
        ({"trial": 8, "data": 1}, "mesh.trial=8 does not divide the 4 trials"),
        ({"trial": 1, "data": 8}, "mesh.data=8 does not divide the 12 rows"),
    ],
)
def test_a_mesh_that_does_not_fit_is_named(shape, message):
    shape = {"trial": None, "data": -1, "model": 1} | shape
    with pytest.raises(ValueError, match=message):
        make_mesh(shape, 4, 12, [Device(i) for i in range(8)])


def test_what_model_does_not_divide_is_named(capsys):
    config = flat(get_config().to_dict()) | {"model.cross_attention.num_heads": 6}
    shape = {"trial": 1, "data": 1, "model": 4}
    warn_of_whole(config, shape)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mesh.model=4 does not divide the 6 heads of cross: ")


@pytest.mark.parametrize(
    "changes, wanted",
    [
        (
            {"model.attention.num_kv_heads": 2},
            [f"key and value heads of {x}: " for x in ("encoder", "decoder", "cross")],
        ),
        (
            {
                "model.attention.num_kv_heads": 4,
                "model.cross_attention.num_kv_heads": 2,
            },
            ["mesh.model=4 does not divide the 2 key and value heads of cross: "],
        ),
        ({"model.attention.num_kv_heads": 1}, []),
        ({"mesh.shard": "parameters"}, ["mesh.shard=parameters divides nothing: "]),
    ],
)
def test_what_a_mesh_leaves_whole_is_named(capsys, changes, wanted):
    config = flat(get_config().to_dict()) | changes
    shape = {"trial": 1, "data": 1, "model": 4}
    warn_of_whole(config, shape)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(wanted)
    assert all(part in line for part, line in zip(wanted, lines, strict=True))


def test_heads_and_hidden_units_are_what_model_divides():
    mesh = make_mesh(
        {"trial": 1, "data": 2, "model": 4}, 1, 2, [Device(i) for i in range(8)]
    )

    def leaf(*shape):
        return jax.ShapeDtypeStruct((1, *shape), np.float32)

    tree = {
        "query": leaf(64, 8, 16),
        "key": leaf(64, 2, 16),  # K is not divided: each device has all of it
        "sink": leaf(8),
        "merge": {"kernel": leaf(8, 16, 64), "router": leaf(64, 8)},
        "mlp": {"up": {"kernel": leaf(64, 1024), "bias": leaf(1024)}},
        "embedding": leaf(1000, 64),
    }
    found = specs(tree, mesh, shard="parameters")
    assert found == {
        "query": PartitionSpec("trial", None, "model", None),
        "key": PartitionSpec("trial", None, None, None),
        "sink": PartitionSpec("trial", "model"),
        "merge": {
            "kernel": PartitionSpec("trial", "model", None, None),
            "router": PartitionSpec("trial", None, "model"),
        },
        "mlp": {
            "up": {
                "kernel": PartitionSpec("trial", "data", "model"),
                "bias": PartitionSpec("trial", "model"),
            }
        },
        "embedding": PartitionSpec("trial", "data", None),
    }
