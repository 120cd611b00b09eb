"""Kernels that the compiler cannot look into, on arrays sharded over batch and heads.

To XLA's partitioner a kernel is opaque: without being told it gathers all operands on
every device. `partitioned` tells it that the axes of the batch, of the heads, and those
that `jax.vmap` adds are independent, and that all others must be whole.
"""

import warnings

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from headcount.attention.platform import platform

INDEPENDENT = ("B", "N", "K")

# The axes of an implementation's arrays.
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
# Those of arrays whose axes may be broadcast.
BROADCAST_AXES = {
    "bias": "BNTS",
    "mask": "BNTS",
    "query_ids": "BT",
    "key_ids": "BS",
    "bounds": "Bxy",
    "blocks": "1xy",
}

# The mesh's axes as `training` names them, and what they divide.
MESH_AXES = {"trial": "R0", "data": "B", "model": "N"}


def partitioned(function, arrays, axes, results, levels=()):
    """`function(arrays)`, run by each device on its own part of the batch and heads.

    Args:
      function: from a dict of arrays to a tuple of them. Works on any B, and on any K
        that divides N.
      arrays: dict of arrays.
      axes: dict of strings, for each array its axes, one letter each: B, N and K are
        batch, heads and key/value heads (K divides N), 1 is an axis that is broadcast,
        other letters are axes that no device may hold in part.
      results: the same for the results, in order. One without N that is computed from
        arrays with it is summed over the devices that share the heads.
      levels: of `jax.vmap`, outermost first: the names of the arrays it maps.
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
        """How a mesh divides operands and results, given how some arrays are."""
        found = {}
        for letters, spec in seen:
            for letter, part in zip(letters, spec, strict=False):
                if part is not None and letter[0] in (*INDEPENDENT, "R"):
                    found.setdefault(letter, part)
        heads = found.get("N", found.get("K"))
        size = _size(mesh, heads)
        # Of a group of heads that is divided every device needs the keys and values;
        # parts of several groups would be too much.
        divided = num_kv_heads % size != 0
        found["K"] = None if divided else heads
        fits = num_heads % size == 0 and (num_kv_heads == 1 or not divided)
        found["N"] = heads if fits else None
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
            return tuple(PartitionSpec(*map(found.get, letters)) for letters in every)

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
        elif platform() == "tpu" or mesh.manual_axes:
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
            if mesh.explicit_axes:  # slopes and keys of dropout may be whole everywhere
                arrays = {
                    name: jax.sharding.reshard(arrays[name], spec)
                    for name, spec in zip(names, ins, strict=True)
                }
            # By default all, which under vmap is all but the axis that vmap took.
            some = {*mesh.explicit_axes, *mesh.auto_axes} if mesh.manual_axes else set()
            return jax.shard_map(
                local,
                in_specs=(dict(zip(names, ins, strict=True)),),
                out_specs=outs,
                axis_names=some,
                check_vma=bool(mesh.manual_axes),  # what varies over those still does
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
    """The letters of arrays by name, for `partitioned`; 1 where one is broadcast.

    `others` are letters of arrays that an implementation holds in its own order.
    """
    letters = AXES | others
    for name in BROADCAST_AXES.keys() & arrays.keys():
        sizes = zip(BROADCAST_AXES[name], arrays[name].shape, strict=True)
        letters[name] = "".join(x if size > 1 else "1" for x, size in sizes)
    return {name: letters[name] for name in arrays}


def varying_alike(arrays):
    """A tree of arrays, all of which vary over the same devices in `jax.shard_map`.

    JAX's own operations do so unasked, and sum the gradient of what did not vary; the
    derivative rule of a kernel cannot.
    """

    def varying(x):
        return jax.typeof(x).manual_axis_type.varying

    every = frozenset().union(*map(varying, jax.tree.leaves(arrays)))
    return jax.tree.map(
        lambda x: jax.lax.pcast(x, tuple(every - varying(x)), to="varying"), arrays
    )


def _by_name(mesh, sizes):
    """What a mesh divides, told by the names of its axes.

    The TPU's compiler has no custom partitioning (github.com/jax-ml/jax/issues/38196),
    and no compiler has where some axes of the mesh are manual, so the arrays' shardings
    are not known here. "trial" divides what `jax.vmap` adds, "data" the batch, "model"
    the heads; an axis that does not divide them evenly cannot have done so before.
    """
    unknown = [
        axis
        for axis in mesh.auto_axes
        if axis not in MESH_AXES and mesh.shape[axis] > 1
    ]
    if unknown:
        raise NotImplementedError(
            f"attention on a TPU, and inside a jax.shard_map of some axes only, cannot "
            f"tell what the mesh axis {unknown[0]!r} divides; name it 'trial', 'data' "
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
    """Shardy's rule: which axes are the same, and which must not be divided."""
    grouped = 1 < num_kv_heads < num_heads
    whole, ones = {}, 0  # a dict keeps the order of appearance, which Shardy wants

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
