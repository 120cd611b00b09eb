"""Sharding of a training step's arrays over a mesh with axes trial × data × model.

    trial  whole trials; needs no communication
    data   rows of each trial's batch; gradients are summed over it
    model  heads and feed-forward hidden units of each trial

Every leaf of the state has a leading trial axis R. `specs` shards parameters and
optimizer state; the compiler derives the rest.
"""

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headcount.runtime.logging import say

AXES = ("trial", "data", "model")
SHARD = ("none", "optimizer", "parameters")  # over `data`: nothing, ZeRO-1, FSDP
BATCH = ("trial", None, "data")  # mesh axes of the axes R, k and B of batches
SMALL = 2**14  # elements; gathering smaller arrays costs more than sharding saves


def rows_of_part(B: int, parts: int) -> int:
    """Return the number of rows of a microbatch (train.accumulate_steps parts).

    Raises:
        ValueError: the number of parts does not divide the rows.
    """
    if parts < 1 or B % parts:
        raise ValueError(
            f"train.accumulate_steps must divide the {B} rows of a batch, got {parts}."
        )
    return B // parts


def make_mesh(
    shape: dict[str, int | None], num_trials: int, num_rows: int, devices=None
) -> Mesh:
    """Return the mesh of a config.

    Args:
        shape: config.mesh: sizes by names in `AXES`. One may be -1, for the remaining
            devices (if both trial and data are -1, data is 1). If trial is None, it is
            the largest size that divides the trials and the remaining devices.
        num_trials: R, a multiple of trial.
        num_rows: B, a multiple of data.
        devices: default: all devices.

    Raises:
        ValueError: the sizes don't fit the devices, the trials or the rows.
    """
    devices = np.array(jax.devices() if devices is None else devices)
    sizes = {axis: shape[axis] for axis in AXES}
    if sizes["trial"] == sizes["data"] == -1:
        sizes["data"] = 1
    text = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    bad = [axis for axis in AXES if sizes[axis] not in (None, -1) and sizes[axis] < 1]
    if bad or list(sizes.values()).count(-1) > 1:
        raise ValueError(
            f"{text}: sizes are at least 1, and one may be -1 (the rest); set the "
            f"others, as in mesh.data=1."
        )
    if sizes["trial"] is None:
        fixed = np.prod([n for axis, n in sizes.items() if axis != "trial" and n > 0])
        sizes["trial"] = int(np.gcd(num_trials, max(1, devices.size // int(fixed))))
    known = int(np.prod([size for size in sizes.values() if size > 0]))
    sizes = {a: devices.size // known if n == -1 else n for a, n in sizes.items()}
    if np.prod(list(sizes.values())) != devices.size:
        raise ValueError(
            f"{text} does not fit the {devices.size} devices; choose sizes whose "
            f"product is {devices.size}, or -1 for the rest."
        )
    for axis, count, of in (
        ("trial", num_trials, "trials"),
        (
            "data",
            num_rows,
            "rows that are computed at once (data.batch_tokens / their length / "
            "train.accumulate_steps)",
        ),
    ):
        if count % sizes[axis]:
            fitting = [str(n) for n in range(1, count + 1) if count % n == 0]
            raise ValueError(
                f"mesh.{axis}={sizes[axis]} does not divide the {count} {of}; choose "
                f"one of {', '.join(fitting)}, or another number of these."
            )
    return Mesh(
        devices.reshape(*sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def _is_variable(node) -> bool:
    return isinstance(node, nnx.Variable)


def specs(tree, mesh: Mesh, *, shard: str = "none", is_state: bool = True):
    """Return the PartitionSpec of every leaf of (a part of) a TrainState.

    Parameters declare their axes where they are created, as the metadata `axes` of
    their Variable: the axes N, K and F are sharded over the mesh axis `model`.

    Args:
        tree: arrays or `jax.ShapeDtypeStruct`s with a leading trial axis R.
        mesh: mesh from `make_mesh`.
        shard: what to shard over `data` besides the rows, a name in `SHARD`.
        is_state: whether the tree is optimizer state instead of parameters.
    """
    divides = shard == "parameters" or shard == "optimizer" and is_state

    def spec(leaf, axes: str | None):
        parts = [None] * (leaf.ndim - 1)
        if axes is not None:
            parts = [
                "model" if letter in "NKF" and size % mesh.shape["model"] == 0 else None
                for letter, size in zip(axes.split(), leaf.shape[1:], strict=True)
            ]
            if mesh.shape["model"] == 1:
                parts = [None] * len(parts)
        if divides and mesh.shape["data"] > 1 and np.prod(leaf.shape[1:]) >= SMALL:
            sizes = [
                size if part is None and size % mesh.shape["data"] == 0 else 0
                for size, part in zip(leaf.shape[1:], parts, strict=True)
            ]
            if max(sizes):
                parts[sizes.index(max(sizes))] = "data"
        return PartitionSpec("trial", *parts)

    def of_variable(node):
        if not isinstance(node, nnx.Variable):
            return spec(node, None)
        return jax.tree.map(lambda x: spec(x, node.get_metadata().get("axes")), node)

    return jax.tree.map(of_variable, tree, is_leaf=_is_variable)


def named(mesh: Mesh, *parts) -> NamedSharding:
    """Return the NamedSharding that shards an array's axes over these mesh axes."""
    return NamedSharding(mesh, PartitionSpec(*parts))


def state_shardings(state, mesh: Mesh, shard: str):
    """Return the NamedSharding of every leaf of a TrainState."""
    parts = state._replace(
        params=specs(state.params, mesh, shard=shard, is_state=False),
        opt_state=specs(state.opt_state, mesh, shard=shard),
        **{
            field: PartitionSpec("trial")
            for field in state._fields
            if field not in ("params", "opt_state")
        },
    )
    return jax.tree.map(
        lambda spec: named(mesh, *spec),
        parts,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def warn_of_undivided(params, config: dict, shape: dict[str, int]) -> None:
    """Log axes that `model` does not divide, and a mesh.shard without effect.

    Args:
        params: parameters of one trial, which may be abstract; see `specs`.
        config: flat.
        shape: shape of the mesh.
    """
    size, names = shape["model"], {"N": "heads", "K": "key/value heads", "F": "units"}
    undivided = set()
    for variable in jax.tree.leaves(params, is_leaf=_is_variable):
        axes = variable.get_metadata().get("axes", "")
        for letter, count in zip(axes.split(), variable.shape, strict=False):
            if letter in names and count > 1 and count % size:
                undivided.add(f"{count} {names[letter]}")
    for what in sorted(undivided):
        say(
            f"mesh.model={size} does not divide the {what}: each device of that axis "
            f"computes all of them."
        )
    if config["mesh.shard"] != "none" and shape["data"] == 1:
        say(f"mesh.shard={config['mesh.shard']} has no effect: mesh.data is 1.")


def abstract(tree, shardings):
    """Return the `jax.ShapeDtypeStruct`s of arrays with shardings."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        shardings,
    )


def abstract_batches(mesh: Mesh, num_trials: int, k: int, spec: dict) -> dict:
    """Return the abstract result of `place_batch`: R k B ... for a spec of B ..."""
    batches = {
        name: jax.ShapeDtypeStruct((num_trials, k, *x.shape), x.dtype)
        for name, x in spec.items()
    }
    return abstract(batches, dict.fromkeys(batches, named(mesh, *BATCH)))


def initial(make, arrays, mesh: Mesh, shard: str):
    """Return the TrainState `make(arrays)`; each device computes its own shards."""
    # it runs once: on CPUs, optimizing the program takes longer than it saves
    options = (
        {"xla_backend_optimization_level": 1} if platform_of(mesh) == "cpu" else {}
    )
    with jax.set_mesh(mesh):  # threads don't inherit the mesh
        shardings = state_shardings(jax.eval_shape(make, arrays), mesh, shard)
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(arrays)


def place(state, mesh: Mesh, shard: str):
    """Put a TrainState on the devices; each process puts its own shards."""
    return jax.tree.map(put, state, state_shardings(state, mesh, shard))


def put(array, sharding: NamedSharding):
    """Shard an array, of which every process has a copy, over all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def keep(state, shard: str):
    """Constrain a TrainState inside a jitted function to the sharding of `place`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.axis_names:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(state, mesh, shard))


class Part(NamedTuple):
    """The part of batches of R trials and B rows that a process needs."""

    trials: slice
    rows: slice
    shape: tuple[int, int]  # R and B of the whole batch


def part_here(mesh: Mesh, num_trials: int, num_rows: int, here=None) -> Part:
    """Return the trials and rows that the devices of a process need.

    This is the bounding box of the devices' shards, which need not form a box.
    """
    here = jax.process_index() if here is None else here
    places = np.argwhere(
        np.vectorize(lambda device: device.process_index == here)(mesh.devices)
    )
    shape = num_trials, num_rows
    sizes = np.array(shape) // mesh.devices.shape[:2]
    starts, stops = places.min(0)[:2] * sizes, (places.max(0)[:2] + 1) * sizes
    trials, rows = map(slice, starts.tolist(), stops.tolist())
    return Part(trials, rows, shape)


def place_batch(batch, part: Part):
    """Put this process's part of batches, R k B ..., on devices of the current mesh."""
    sharding = named(jax.sharding.get_mesh(), *BATCH)

    def place(array):
        if sharding.is_fully_addressable:
            return jax.device_put(array, sharding)
        (R, B), (_, k, _, *rest) = part.shape, array.shape
        whole = R, k, B, *rest
        first = part.trials.start, 0, part.rows.start, *[0] * len(rest)

        def piece(at):
            ends = [x.indices(n)[:2] for x, n in zip(at, whole, strict=True)]
            moved = zip(ends, first, strict=True)
            return array[tuple(slice(a - by, b - by) for (a, b), by in moved)]

        return jax.make_array_from_callback(whole, sharding, piece)

    return jax.tree.map(place, batch)


def over_data(batch: dict[str, np.ndarray]) -> dict:
    """Shard the rows of a batch without a trial axis over `data` of the current mesh.

    Rows of zeros, which have no tokens, are added so that `data` divides the rows.
    """
    mesh = jax.sharding.get_mesh()
    size = mesh.shape.get("data", 1)
    if size == 1:
        return batch

    def place(array):
        padding = [(0, -len(array) % size)] + [(0, 0)] * (array.ndim - 1)
        return put(np.pad(array, padding), named(mesh, "data"))

    return jax.tree.map(place, batch)


def to_all(tree):
    """Start replicating arrays on all processes, so that each can read them."""
    if jax.process_count() == 1:
        return tree
    return moved(tree, named(jax.sharding.get_mesh()))


def moved(tree, where: NamedSharding):
    """Reshard arrays across the devices of several processes."""
    if platform_of(where.mesh) != "cpu":
        return jax.device_put(tree, where)
    # one at a time: with many transfers at once, CPU processes may deadlock
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, where).block_until_ready(), tree
    )


def fetch(tree):
    """Return whole arrays on the host, in every process."""
    return jax.tree.map(np.asarray, to_all(tree))


class Share(NamedTuple):
    """The share of a process in the work on a trial."""

    trial: int
    place: int  # index of this process among those that hold the trial
    count: int  # number of these processes


def trials_here(params, mesh: Mesh):
    """Yield the trials that this process can compute on its own devices.

    On accelerators, all devices compute their trials at the same time; on CPUs, trials
    are computed one after another. Only one of a process's devices that hold a trial
    computes it.

    Args:
        params: parameters with a leading trial axis R.
        mesh: the current mesh, from `make_mesh`.

    Yields:
        The `Share` in each of some trials, and their parameters. Until the next
        iteration, the current mesh consists of the devices of these parameters.
    """
    here, whole = jax.process_index(), params
    if mesh.size > 1:
        whole = moved(params, named(mesh, "trial"))
    size = len(jax.tree.leaves(params)[0]) // mesh.shape["trial"]  # trials per part
    shares, devices = [], []
    for part in range(mesh.shape["trial"]):
        holders = mesh.devices[part].ravel().tolist()
        processes = sorted({device.process_index for device in holders})
        if here in processes:
            devices.append(next(d for d in holders if d.process_index == here))
            of_part = processes.index(here), len(processes)
            trials = range(part * size, (part + 1) * size)
            shares.append([Share(trial, *of_part) for trial in trials])
    if platform_of(mesh) != "cpu":
        mesh = trial_mesh(devices)
        with jax.set_mesh(mesh):
            yield sum(shares, []), jax.tree.map(partial(of_devices, mesh), whole)
        return
    for device, of_device in zip(devices, shares, strict=True):
        with jax.set_mesh(trial_mesh([device])):
            for index, share in enumerate(of_device):
                one = slice(index, index + 1)
                yield (
                    [share],
                    jax.tree.map(lambda x, d=device, i=one: shard(x, d)[i], whole),
                )


def platform_of(mesh: Mesh) -> str:
    """Return "cpu", "gpu" or "tpu"."""
    return mesh.devices.flat[0].platform


def trial_mesh(devices: list) -> Mesh:
    """Return a mesh that shards only over trials."""
    return Mesh(
        np.array(devices).reshape(-1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3
    )


def of_devices(mesh: Mesh, array):
    """Join the shards of an array on the devices of a `trial_mesh` into one array."""
    parts = [shard(array, device) for device in mesh.devices.ravel()]
    shape = (sum(map(len, parts)), *array.shape[1:])
    where = named(mesh, "trial")
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def shard(array, device):
    """Return an array's shard on a device of this process."""
    return next(x.data for x in array.addressable_shards if x.device == device)


def gathered(params, shard: str):
    """Gather one trial's parameters along `data` before they are used (ZeRO, FSDP).

    From the sharding of the parameters alone (see `specs`), the compiler would shard
    activations the same way, which moves far more data.
    """
    return params if shard == "none" else _constrained(params, "none")


def scattered(gradient, shard: str):
    """Shard one trial's gradient along `data`, like the optimizer's state."""
    return gradient if shard == "none" else _constrained(gradient, shard)


def _constrained(tree, shard: str):
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.axis_names:
        return tree
    of_trials = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), tree
    )

    def constrain(leaf, spec):
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*spec[1:]))

    parts = specs(of_trials, mesh, shard=shard)
    return jax.tree.map(constrain, tree, parts)
