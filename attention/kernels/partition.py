"""Run kernels on arrays that are sharded over batch and heads.

A kernel is opaque to XLA's partitioner, which by default gathers all operands on every
device. `partitioned` declares the axes of batch and heads, and those that `jax.vmap`
adds, as independent; all other axes must not be sharded.
"""

import functools
import warnings

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from headcount.attention.platform import platform

INDEPENDENT = ("B", "N", "K")

# Axes of arrays as implementations receive them.
AXES = {
    "query": "BTNH",
    "key": "BSKH",
    "value": "BSKV",
    "out_gradient": "BTNV",
    "maximum": "BTN",
    "delta": "BTN",
    "query_seq_lengths": "B",
    "key_value_seq_lengths": "B",
    "query_segment_ids": "BT",
    "key_value_segment_ids": "BS",
    "alibi_slopes": "N",
    "dropout_keys": "BTN",
}
# The same for arrays whose axes may have size 1 and be broadcast.
BROADCAST_AXES = {
    "bias": "BNTS",
    "mask": "BNTS",
    "query_ids": "BT",
    "key_ids": "BS",
    "bounds": "Bxy",
    "blocks": "1xy",
}

# Mesh axes as `training` names them, and the array axis that each one shards.
MESH_AXES = {"trial": "R0", "data": "B", "model": "N"}


def partitioned(function, arrays, axes, results, levels=()):
    """Call `function(arrays)` on each device's shard of the batch and heads.

    Args:
      function: maps a dict of arrays to a tuple of arrays. Must work for any B, and for
        any K that divides N.
      arrays: dict of arrays.
      axes: dict of strings, the axes of each array, one letter each. B, N and K are
        batch, heads and key/value heads (K divides N), 1 is a broadcast axis, and other
        letters are axes that may not be sharded.
      results: the axes of the results, in order. If query heads that share a key/value
        head are on several devices, results without N are summed over these devices.
      levels: for each `jax.vmap`, outermost first, the names of the arrays it maps.
    """

    def mapped(arrays):
        call = function
        for level in reversed(levels):
            in_axes = {name: 0 if name in level else None for name in arrays}
            call = jax.vmap(call, in_axes=(in_axes,))
        return call(arrays)

    names = sorted(arrays)
    num_heads = arrays["query"].shape[-2]
    num_kv_heads = arrays["key"].shape[-2]

    def leading(name):
        return [f"R{i}" for i, level in enumerate(levels) if name in level]

    operand_axes = [(*leading(name), *axes[name]) for name in names]
    every = [f"R{i}" for i in range(len(levels))]
    result_axes = [(*every, *result) for result in results]

    def plan(mesh, seen):
        """Choose shardings of operands and results from known ones of some arrays."""
        parts = {}
        for letters, spec in seen:
            for letter, part in zip(letters, spec, strict=False):
                if part is not None and letter[0] in (*INDEPENDENT, "R"):
                    parts.setdefault(letter, part)
        heads = parts.get("N", parts.get("K"))
        size = _size(mesh, heads)
        # If query heads of one group are on several devices, each needs the keys and
        # values. This is only supported with a single group (K = 1).
        divided = num_kv_heads % size != 0
        parts["K"] = None if divided else heads
        fits = num_heads % size == 0 and (num_kv_heads == 1 or not divided)
        parts["N"] = heads if fits else None
        if not fits:
            warnings.warn(
                f"Attention gathers its heads on every device: {num_heads} heads that "
                f"read {num_kv_heads} key/value heads cannot be divided by the mesh "
                f"axis {heads!r} of {size} devices. Make num_heads a multiple of "
                f"{size} and num_kv_heads too (or 1), or the axis smaller.",
                stacklevel=2,
            )

        def local(arrays):
            outcomes = mapped(arrays)
            if not (divided and fits):
                return outcomes
            return tuple(
                outcome if "N" in letters else jax.lax.psum(outcome, heads)
                for outcome, letters in zip(outcomes, results, strict=True)
            )

        def specs(every):
            return tuple(PartitionSpec(*map(parts.get, letters)) for letters in every)

        return local, specs(operand_axes), specs(result_axes)

    def partition(mesh, operands, outcomes):
        shardings = (*(operands[0][name].sharding for name in names),)
        shardings += tuple(outcome.sharding for outcome in outcomes)
        seen = [
            (letters, sharding.spec)
            for letters, sharding in zip(
                (*operand_axes, *result_axes), shardings, strict=True
            )
        ]
        local, ins, outs = plan(mesh, seen)
        ins, outs = (tuple(NamedSharding(mesh, s) for s in x) for x in (ins, outs))
        return mesh, local, outs, (dict(zip(names, ins, strict=True)),)

    def call(arrays):
        mesh = jax.sharding.get_abstract_mesh()
        seen = None
        if mesh.explicit_axes:
            seen = [
                (letters, jax.typeof(arrays[name]).sharding.spec)
                for name, letters in zip(names, operand_axes, strict=True)
            ]
        elif _goes_by_name(mesh):
            if not mesh.auto_axes:
                return mapped(arrays)
            sizes = [
                x
                for name in names
                for x in zip(leading(name), arrays[name].shape, strict=False)
            ]
            sizes += [("B", arrays["query"].shape[-4]), ("N", num_heads)]
            seen = _by_name(mesh, dict(sizes))
        if seen is not None:
            local, ins, outs = plan(mesh, seen)
            if mesh.explicit_axes:  # slopes and dropout keys may be replicated
                arrays = {
                    name: jax.sharding.reshard(arrays[name], spec)
                    for name, spec in zip(names, ins, strict=True)
                }
            # An empty set means all axes; under vmap, all but those that vmap uses.
            some = {*mesh.explicit_axes, *mesh.auto_axes} if mesh.manual_axes else set()
            return jax.shard_map(
                local,
                in_specs=(dict(zip(names, ins, strict=True)),),
                out_specs=outs,
                axis_names=some,
                check_vma=bool(mesh.manual_axes),  # keeps what varies over those axes
            )(arrays)
        inferred = custom_partitioning(mapped)
        inferred.def_partition(
            partition, **_rule(operand_axes, result_axes, num_heads, num_kv_heads)
        )
        return inferred(arrays)

    vmappable = custom_vmap(call)

    @vmappable.def_vmap
    def _(axis_size, in_batched, arrays):
        del axis_size
        level = frozenset(name for name, batched in in_batched[0].items() if batched)
        outcome = partitioned(function, arrays, axes, results, (level, *levels))
        return outcome, (True,) * len(outcome)

    constant = jax.custom_jvp(vmappable)
    constant.defjvp(_refuse)
    return constant(arrays)


def axes_of(arrays, **others):
    """Return the `axes` argument of `partitioned`, with 1 for axes that are broadcast.

    `others` gives the axes of arrays that an implementation lays out differently.
    """
    letters = AXES | others
    for name in BROADCAST_AXES.keys() & arrays.keys():
        sizes = zip(BROADCAST_AXES[name], arrays[name].shape, strict=True)
        letters[name] = "".join(x if size > 1 else "1" for x, size in sizes)
    return {name: letters[name] for name in arrays}


def varying_alike(arrays):
    """Cast a tree of arrays to vary over the same mesh axes in `jax.shard_map`.

    JAX's own operations insert this cast, whose derivative sums gradients over devices.
    A kernel's custom derivative cannot.
    """

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    every = frozenset().union(*map(varying, jax.tree.leaves(arrays)))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(every - varying(x)), to="varying"), arrays
    )


def unknown_axis() -> str | None:
    """Return an axis of the current mesh that `partitioned` would raise for, if any."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes or not _goes_by_name(mesh):
        return None
    return _unknown_axis(mesh)


def _goes_by_name(mesh) -> bool:
    """Return whether shardings are inferred from names; see `_by_name`."""
    return platform() == "tpu" or bool(mesh.manual_axes)


def _unknown_axis(mesh) -> str | None:
    known = (*MESH_AXES, *(axis for axis, size in mesh.shape.items() if size == 1))
    return next((axis for axis in mesh.auto_axes if axis not in known), None)


def _by_name(mesh, sizes):
    """Infer shardings from the names of the mesh's axes.

    The TPU compiler lacks custom partitioning (github.com/jax-ml/jax/issues/38196), as
    does every compiler if some axes of the mesh are manual, so the arrays' shardings
    are unknown here. Assume that "trial" shards the axes that `jax.vmap` adds, "data"
    the batch, and "model" the heads. Mesh axes that do not divide their axis evenly are
    skipped: they cannot shard it.

    Raises:
      NotImplementedError: the mesh has an axis of another name and more than 1 device.
    """
    unknown = _unknown_axis(mesh)
    if unknown is not None:
        raise NotImplementedError(
            f"attention on a TPU, and inside a jax.shard_map of some axes only, cannot "
            f"tell what the mesh axis {unknown!r} divides; name it 'trial', 'data' "
            "(batch) or 'model' (heads), or make it one of jax.shard_map's"
        )
    return [
        ((letter,), (axis,))
        for axis, letter in MESH_AXES.items()
        if axis in mesh.auto_axes and sizes.get(letter, 0) % mesh.shape[axis] == 0
    ]


def _refuse(primals, tangents):
    raise NotImplementedError(
        "this implementation of attention has a first derivative only; use 'reference' "
        "for a second one"
    )


def _size(mesh, part):
    parts = part if isinstance(part, tuple) else (part,)
    size = 1
    for axis in parts:
        size *= 1 if axis is None else mesh.shape[axis]
    return size


def _rule(operand_axes, result_axes, num_heads, num_kv_heads):
    """Return Shardy's rule: which axes correspond, and which must be replicated."""
    grouped = 1 < num_kv_heads < num_heads
    whole, ones = {}, 0  # a dict, because Shardy needs them in order of appearance

    def spell(letters):
        nonlocal ones
        words = []
        for letter in letters:
            if letter == "1":
                ones += 1
                words.append(f"one{ones}")
            elif letter == "N" and grouped:
                words.append("(k g)")
                whole["g"] = True
            elif letter == "N" and num_kv_heads == num_heads or letter == "K":
                words.append("k")
            else:
                words.append(letter.lower())
                if letter[0] not in (*INDEPENDENT, "R"):
                    whole[letter.lower()] = True
        return " ".join(words)

    operands = ", ".join(spell(letters) for letters in operand_axes)
    results = ", ".join(spell(letters) for letters in result_axes)
    sizes = {"g": num_heads // num_kv_heads} if grouped else {}
    return {
        "sharding_rule": f"{operands} -> {results}",
        "need_replication_factors": tuple(whole),
        **sizes,
    }


def varying_like(arrays, shape, dtype):
    """Return a result's type, which varies over the mesh axes of any input."""
    varying = functools.reduce(
        frozenset.union,
        (jax.typeof(x).manual_axis_type.varying for x in arrays.values()),
    )
    return jax.ShapeDtypeStruct(
        shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=varying)
    )
