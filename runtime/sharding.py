"""Where the arrays of a training step lie: a mesh of trial × data × model.

    trial  whole trials; needs no communication at all
    data   rows of each trial's batch; the gradients are added up
    model  heads and the feed-forward's hidden units of each trial

Every leaf of the state has the trial axis R in front. What the other axes divide is
told by `LETTERS`; the compiler derives the rest from it.
"""

import contextlib
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headcount.attention.merge import MERGE_RULES
from headcount.attention.partition import MESH_AXES
from headcount.attention.platform import platform
from headcount.runtime.logging import say
from headcount.training.trials import SITES, setting_at

AXES = tuple(MESH_AXES)  # trial, data, model
SHARD = ("none", "optimizer", "parameters")  # over data: nothing, ZeRO-1, FSDP
BATCH = ("trial", None, "data")  # what divides the axes R, k and B of batches
SMALL = 2**14  # numbers; arrays below stay whole, for to gather them costs more

# The axes of a parameter by the end of its path; of N, K and F the mesh divides.
LETTERS = {
    ("query", 3): "D N H",
    ("key", 3): "D K H",
    ("value", 3): "D K V",
    ("query_bias", 2): "N H",
    ("key_bias", 2): "K H",
    ("value_bias", 2): "K V",
    ("sink", 1): "N",
    ("up.kernel", 2): "D F",
    ("up.bias", 1): "F",
    ("down.kernel", 2): "F D",
} | {
    (f"merge.{name}", len(letters.split())): letters
    for rule in MERGE_RULES.values()
    for name, letters in rule.shapes.items()
}


def rows_of_part(B: int, parts: int) -> int:
    """Rows of a batch that are computed at a time, which a mesh divides.

    Raises:
        ValueError: the parts, train.accumulate_steps, do not divide the rows.
    """
    if parts < 1 or B % parts:
        raise ValueError(
            f"train.accumulate_steps must divide the {B} rows of a batch, got {parts}."
        )
    return B // parts


def make_mesh(
    shape: dict[str, int | None], num_trials: int, num_rows: int, devices=None
) -> Mesh:
    """The mesh of a config.

    Args:
        shape: config.mesh: sizes by the names of `AXES`; one of them may be -1, what
            the others leave (trial and data: data is 1). trial None: the most that
            divide the trials and what the other axes leave of the devices.
        num_trials: R, which trial must divide.
        num_rows: B, which data must divide.
        devices: default: all.

    Raises:
        ValueError: sizes that don't fit the devices, the trials or the rows.
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
            f"{text} does not make the {devices.size} devices there are; choose sizes "
            f"whose product they are, one of them -1 for what the others leave."
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


def specs(tree, mesh: Mesh, *, shard: str = "none", is_state: bool = True):
    """The PartitionSpec of every leaf of a (part of a) TrainState.

    Args:
        tree: of arrays or `jax.ShapeDtypeStruct`s with the trial axis R in front.
        mesh: of `make_mesh`.
        shard: what `data` divides besides the rows, a name of `SHARD`.
        is_state: of the optimizer, not parameters.
    """
    divides = shard == "parameters" or shard == "optimizer" and is_state

    def spec(path, leaf):
        # A Variable's leaf stands under an attribute of it, which is no part's name.
        names = [str(key.key) for key in path if hasattr(key, "key")]
        parts = _model_parts(names, leaf.shape[1:], mesh)
        if divides and mesh.shape["data"] > 1 and np.prod(leaf.shape[1:]) >= SMALL:
            sizes = [
                size if part is None and size % mesh.shape["data"] == 0 else 0
                for size, part in zip(leaf.shape[1:], parts, strict=True)
            ]
            if max(sizes):
                parts[sizes.index(max(sizes))] = "data"
        return PartitionSpec("trial", *parts)

    return jax.tree.map_with_path(spec, tree)


def _model_parts(names: list[str], shape: tuple[int, ...], mesh: Mesh) -> list:
    size = mesh.shape["model"]
    ends = (names[-1:], names[-2:]) if size > 1 else ()
    for end in ends:
        letters = LETTERS.get((".".join(end), len(shape)))
        if letters is not None:
            return [
                "model" if letter in "NKF" and length % size == 0 else None
                for letter, length in zip(letters.split(), shape, strict=True)
            ]
    return [None] * len(shape)


def named(mesh: Mesh, *parts) -> NamedSharding:
    """A sharding by the mesh axes that divide an array's, first to last."""
    return NamedSharding(mesh, PartitionSpec(*parts))


def state_shardings(state, mesh: Mesh, shard: str):
    """The NamedSharding of every leaf of a TrainState."""
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


def warn_of_whole(config: dict, shape: dict[str, int]) -> None:
    """Say what a mesh leaves whole: what `model` or mesh.shard does not divide.

    Args:
        config: flat.
        shape: of the mesh.
    """
    size = shape["model"]
    counts = {f"heads of {s}": setting_at(config, s, "num_heads") for s in SITES}
    for site in SITES:
        K = setting_at(config, site, "num_kv_heads")
        if K is not None and K > 1:  # one head is needed by all in any case
            counts[f"key and value heads of {site}"] = K
    counts["hidden units (model.mlp_dim)"] = config["model.mlp_dim"]
    for what, count in counts.items():
        if count % size:
            say(
                f"mesh.model={size} does not divide the {count} {what}: each device "
                f"of that axis computes all of them."
            )
    if config["mesh.shard"] != "none" and shape["data"] == 1:
        say(
            f"mesh.shard={config['mesh.shard']} divides nothing: it does so over "
            f"mesh.data, which is 1 here."
        )


def abstract(tree, shardings):
    """Shapes of arrays that lie somewhere."""
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        shardings,
    )


def abstract_batches(mesh: Mesh, num_trials: int, k: int, spec: dict) -> dict:
    """Return the shapes of what `place_batch` makes: R k B ... for a spec of B ..."""
    batches = {
        name: jax.ShapeDtypeStruct((num_trials, k, *x.shape), x.dtype)
        for name, x in spec.items()
    }
    return abstract(batches, dict.fromkeys(batches, named(mesh, *BATCH)))


def initial(make, arrays, mesh: Mesh, shard: str):
    """The TrainState `make(arrays)`; each device computes what it will hold of it."""
    # It runs once: on a CPU, to make it fast takes a second longer than it saves.
    options = {"xla_backend_optimization_level": 1} if platform() == "cpu" else None
    with jax.set_mesh(mesh):  # also in a thread that does not know of it
        shardings = state_shardings(jax.eval_shape(make, arrays), mesh, shard)
        return jax.jit(make, out_shardings=shardings, compiler_options=options)(arrays)


def place(state, mesh: Mesh, shard: str):
    """Put the arrays of a TrainState where they belong; each host its part."""
    return jax.tree.map(put, state, state_shardings(state, mesh, shard))


def put(array, sharding: NamedSharding):
    """Put an array, which every process has whole, on the devices of all."""
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda at: array[at])


def keep(state, shard: str):
    """Inside a program: let a TrainState stay where it was, see `place`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size == 1 or not mesh.axis_names:
        return state
    return jax.lax.with_sharding_constraint(state, state_shardings(state, mesh, shard))


class Part(NamedTuple):
    """What this process needs of batches of R trials and B rows."""

    trials: slice
    rows: slice
    shape: tuple[int, int]  # R, B of the whole


def part_here(mesh: Mesh, num_trials: int, num_rows: int, here=None) -> Part:
    """The trials and rows whose losses the devices of a process compute.

    At least: what its devices have need not be a box, and this one is around it.
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
    """Put this process's part of batches, R k B ..., on the devices of the mesh set."""
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


def to_all(tree):
    """Begin to give every process the whole of arrays, so that each can read them."""
    if jax.process_count() == 1:
        return tree
    return moved(tree, named(jax.sharding.get_mesh()))


def moved(tree, where: NamedSharding):
    """Put arrays that lie on devices of several processes elsewhere on these."""
    if platform() != "cpu":
        return jax.device_put(tree, where)
    # One at a time: with many on their way at once, CPUs of several processes may
    # wait for each other forever.
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, where).block_until_ready(), tree
    )


def fetch(tree):
    """Arrays on the host, whole, in every process."""
    return jax.tree.map(np.asarray, to_all(tree))


class Share(NamedTuple):
    """What this process has of the work on a trial."""

    trial: int
    place: int  # among the processes that hold the trial
    count: int  # of these


def trials_here(params, mesh: Mesh):
    """Yield the trials that this process can compute with on devices of its own.

    Accelerators take all at once, each those that it holds; CPUs one after another. Of
    the devices that hold a trial one computes.

    Args:
        params: leaves with the trial axis R in front.
        mesh: of `make_mesh`, the one set.

    Yields:
        A Share of each of some trials, and their parameters. What is computed until the
        next ones is computed on the devices of the parameters.
    """
    here, whole = jax.process_index(), params
    if mesh.size > 1:
        whole = moved(params, named(mesh, "trial"))
    size = len(jax.tree.leaves(params)[0]) // mesh.shape["trial"]  # of a part
    shares, devices = [], []
    for part in range(mesh.shape["trial"]):
        holders = mesh.devices[part].ravel().tolist()
        processes = sorted({device.process_index for device in holders})
        if here in processes:
            devices.append(next(d for d in holders if d.process_index == here))
            of_part = processes.index(here), len(processes)
            trials = range(part * size, (part + 1) * size)
            shares.append([Share(trial, *of_part) for trial in trials])
    if platform() != "cpu":
        mesh = line(devices)
        with jax.set_mesh(mesh):
            yield sum(shares, []), jax.tree.map(partial(of_devices, mesh), whole)
        return
    for device, of_device in zip(devices, shares, strict=True):
        with jax.set_mesh(line([device])):
            for index, share in enumerate(of_device):
                one = slice(index, index + 1)
                yield (
                    [share],
                    jax.tree.map(lambda x, d=device, i=one: shard(x, d)[i], whole),
                )


def line(devices: list) -> Mesh:
    """A mesh that divides trials alone."""
    return Mesh(
        np.array(devices).reshape(-1, 1, 1), AXES, axis_types=(AxisType.Auto,) * 3
    )


def of_devices(mesh: Mesh, array):
    """What the devices of a `line` have of an array, as an array of theirs alone."""
    parts = [shard(array, device) for device in mesh.devices.ravel()]
    shape = (sum(map(len, parts)), *array.shape[1:])
    where = named(mesh, "trial")
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def shard(array, device):
    """What a device of this process has of an array."""
    return next(x.data for x in array.addressable_shards if x.device == device)


def gathered(params, shard: str):
    """Gather one trial's parameters along `data` before they are used (ZeRO, FSDP).

    `specs` says what of the state `data` divides. From that alone the compiler would
    divide activations the same way, which moves far more data.
    """
    return params if shard == "none" else _lying(params, "none")


def scattered(gradient, shard: str):
    """Scatter one trial's gradient along `data`, as the optimizer's state is."""
    return gradient if shard == "none" else _lying(gradient, shard)


def _lying(tree, shard: str):
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


@contextlib.contextmanager
def using(mesh: Mesh | None):
    """Compute on a mesh in this block; None: on the one that is set."""
    if mesh is None:
        yield
        return
    with jax.set_mesh(mesh):
        yield
