"""A mesh changes where a step is computed, and nothing else."""

import json
import subprocess
import sys
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
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


def test_training_in_two_processes_equals_one_device(eight):
    address = free_address()
    both = [start(4, RUNS[1:2], address, "2", str(i)) for i in range(2)]
    first, second = [found(process)[0] for process in both]
    assert first == second
    assert first["compiling"] == 0  # all was compiled before the steps
    np.testing.assert_allclose(first["loss"], eight[0]["loss"], rtol=2e-5)
    specs_of_state = " ".join(first["specs"])
    assert "'data'" in specs_of_state and "'model'" in specs_of_state


def test_training_on_eight_devices_equals_one(eight):
    one, *others = eight[: len(RUNS)]
    assert np.shape(one["loss"]) == (2, 4) and np.isfinite(one["loss"]).all()
    assert one["loss"][0] != one["loss"][1]
    for other in others:
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-5)
    # divided it was, and stayed
    specs_of_state = [" ".join(other["specs"]) for other in others]
    assert "'data'" in specs_of_state[0] and "'model'" in specs_of_state[0]
    assert "'data'" in specs_of_state[1] and "'model'" not in specs_of_state[1]


def test_accumulation_on_eight_devices_equals_one(eight):
    """Every device has rows of each part, or there would be nothing to share."""
    one, other = eight[len(RUNS) :]
    np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-5)
    assert one["loss"] != eight[0]["loss"]  # dropout drops other elements


def test_translations_on_any_mesh_equal_those_of_one_device():
    """A trial after the other, as on CPUs, and all in step, as on accelerators."""
    meshes = [{"trial": 1, "data": 1}, {"trial": 2, "data": 2}]
    shapes = [mesh | {"model": 1} for mesh in meshes]
    printed = found(start(4, shapes, module="sharded_decoding"))
    one, *others = printed["translations"]
    assert one[3] == one[1]  # that trial alone
    assert len({str(translation) for trial in one for translation in trial}) > 10
    assert len(others) == 3 and all(other == one for other in others)
    assert printed["moved"] == [{}, {}], "each device decodes on its own"


def test_scores_on_any_mesh_equal_those_of_one_device():
    """Each device computes its own rows, also if their number has to be padded."""
    meshes = [{"trial": 1, "data": 1}, {"trial": 2, "data": 3}]
    shapes = [mesh | {"model": 1} for mesh in meshes]
    printed = found(start(6, shapes, module="sharded_evaluation"))
    assert len(printed) == 6
    for one, other in zip(printed[::2], printed[1::2], strict=True):
        assert one["task"] == other["task"]
        assert one["scores"][0] != one["scores"][1]
        for ours, theirs in zip(other["scores"], one["scores"], strict=True):
            assert ours == pytest.approx(theirs, rel=2e-5)
        assert all(part == whole for part, whole in one["rows"])
        assert all(3 * part == whole for part, whole in other["rows"])


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
def test_mesh_divides_trials_first(count, trials, shape, wanted):
    devices = [Device(i) for i in range(count)]
    shape = {"trial": None, "data": -1, "model": 1} | shape
    mesh = make_mesh(shape, trials, 8, devices)
    assert tuple(mesh.shape.values()) == wanted
    assert mesh.axis_names == ("trial", "data", "model")


@pytest.mark.parametrize(
    "shape, message",
    [
        ({"trial": 3, "data": 1}, "mesh.trial=3 x mesh.data=1 .* 8 devices"),
        ({"model": -1}, "one may be -1"),
        ({"model": 0}, "at least 1"),
        ({"trial": 8, "data": 1}, "mesh.trial=8 does not divide the 4 trials"),
        ({"trial": 1, "data": 8}, "mesh.data=8 does not divide the 12 rows"),
    ],
)
def test_a_mesh_that_does_not_fit_raises_an_error_that_names_the_key(shape, message):
    shape = {"trial": None, "data": -1, "model": 1} | shape
    with pytest.raises(ValueError, match=message):
        make_mesh(shape, 4, 12, [Device(i) for i in range(8)])


@pytest.mark.parametrize(
    "model, wanted",
    [
        ({}, []),
        (
            {"cross_attention": {"num_heads": 6, "head_dim": 16, "value_dim": 16}},
            ["6 heads", "6 key/value heads"],
        ),
        ({"attention": {"num_kv_heads": 2}}, ["2 key/value heads"]),
        ({"attention": {"num_kv_heads": 1}}, []),  # shared by all heads
        ({"mlp_dim": 250}, ["250 units"]),
    ],
)
def test_what_mesh_model_does_not_divide_is_logged(capsys, model, wanted):
    config = get_config()
    for key, value in model.items():
        if isinstance(value, dict):
            config.model[key].update(value)
        else:
            config.model[key] = value
    build = partial(Transformer, 64, **config.model.to_dict())
    params = nnx.split(abstract(build))[1]
    shape = {"trial": 1, "data": 1, "model": 4}
    warn_of_undivided(params, flat(config.to_dict()), shape)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(wanted)
    for what, line in zip(wanted, lines, strict=True):
        assert f"mesh.model=4 does not divide the {what}: " in line


def test_mesh_shard_without_data_is_logged(capsys):
    config = flat(get_config().to_dict()) | {"mesh.shard": "parameters"}
    params = nnx.split(
        abstract(partial(Transformer, 64, **get_config().model.to_dict()))
    )[1]
    warn_of_undivided(params, config, {"trial": 1, "data": 1, "model": 1})
    (line,) = capsys.readouterr().err.splitlines()
    assert "mesh.shard=parameters" in line and "mesh.data" in line
    warn_of_undivided(params, config, {"trial": 1, "data": 2, "model": 1})
    assert not capsys.readouterr().err


def test_specs_divide_heads_and_units_by_model_and_large_arrays_by_data():
    mesh = make_mesh(
        {"trial": 1, "data": 2, "model": 4}, 1, 2, [Device(i) for i in range(8)]
    )

    def leaf(axes, *shape):
        return nnx.Param(jax.ShapeDtypeStruct((1, *shape), np.float32), axes=axes)

    tree = {
        "query": leaf("D N H", 64, 8, 16),
        "key": leaf("D K H", 64, 2, 16),  # 4 does not divide 2: whole
        "sink": leaf("N", 8),
        "kernel": leaf("N V D", 8, 16, 64),
        "router": leaf("D N", 64, 8),
        "up": leaf("D F", 64, 1024),
        "bias": leaf("F", 1024),
        "embedding": leaf("vocab D", 1000, 64),
    }
    wanted = {
        "query": PartitionSpec("trial", None, "model", None),
        "key": PartitionSpec("trial", None, None, None),
        "sink": PartitionSpec("trial", "model"),
        "kernel": PartitionSpec("trial", "model", None, None),
        "router": PartitionSpec("trial", None, "model"),
        "up": PartitionSpec("trial", "data", "model"),
        "bias": PartitionSpec("trial", "model"),
        "embedding": PartitionSpec("trial", "data", None),
    }
    found = specs(tree, mesh, shard="parameters")
    assert {k: jax.tree.leaves(x)[0] for k, x in found.items()} == wanted
    # ZeRO-1 divides the optimizer's state by data, and leaves the parameters whole
    whole = {
        k: [x and x.replace("data", "") or None for x in s] for k, s in wanted.items()
    }
    of_params = specs(tree, mesh, shard="optimizer", is_state=False)
    assert {k: [*jax.tree.leaves(x)[0]] for k, x in of_params.items()} == whole
    of_state = specs(tree, mesh, shard="optimizer")
    assert {k: jax.tree.leaves(x)[0] for k, x in of_state.items()} == wanted
