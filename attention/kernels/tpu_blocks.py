"""Lay out arrays `B T N H` and run the kernels of `kernels.tpu` on their blocks.

Arrays have a leading axis R, the trials that `jax.vmap` adds; R and B are full size or
1. The grid's innermost axis runs over the blocks that are reduced into a result. The
structured masks, and for segments and lengths `bounds` in scalar memory, limit the
range of these blocks. Blocks outside are not computed, nor copied, because the block
index then does not change.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from headcount.attention import masks
from headcount.attention.kernels.partition import varying_like
from headcount.attention.kernels.tpu_kernels import LANES, Block

# Axes of each array as the kernels receive it, one letter each: R trials, B batch,
# N heads, K key/value heads, T and S positions. Other axes are not divided into blocks.
AXES = {
    "query": "RBNHT",
    "key": "RBKHS",
    "value": "RBKVS",
    "out": "RBNVT",
    "out_gradient": "RBNVT",
    "query_gradient": "RBNHT",
    "key_gradient": "RBKHS",
    "value_gradient": "RBKVS",
    "highest": "RBNxT",
    "confidence": "RBNxT",
    "delta": "RBNxT",
    "dropout_keys": "RBNxT",
    "alibi_slopes": "RBNxx",
    "rows": "RBNxT",
    "query_ids": "RBxT",
    "key_ids": "RBxS",
    **{
        f"{name}{part}": axes
        for name in ("mask", "bias")
        for part, axes in (
            ("", "RBNTS"),
            ("_of_queries", "RBNxT"),
            ("_of_keys", "RBNxS"),
        )
    },
}

# A v5p has 64 MiB, v5e and v6e have 128. The compiler's default limit can be 16 MiB.
VMEM = 32 * 2**20

# Ids of excluded queries and keys, which match nothing.
EXCLUDED_QUERY = np.iinfo(np.int32).min
EXCLUDED_KEY = EXCLUDED_QUERY + 1
# Padding of the last blocks, where it is not 0. Logits of a padding query are just the
# keys' bias: if its `highest` were 0, exp(89) times a confidence of 0 would be NaN.
FILL = {
    "query_ids": EXCLUDED_QUERY,
    "key_ids": EXCLUDED_KEY,
    "highest": -masks.EMPTY,
}


def tile(length: int, most: int) -> int:
    """Return a block length: a multiple of `LANES`, at most `most`, little padding."""
    blocks = pl.cdiv(length, most)
    return pl.cdiv(pl.cdiv(length, blocks), LANES) * LANES


def run(kernel, problem, arrays, outputs, scratch, *, tiles, by_key=False):
    """Run a kernel over all blocks.

    Args:
      arrays: by name, in the layout of `attention.api` with a leading R: query
        `R B T N H`, and so on.
      outputs: dict of (shape, dtype). Shapes lack R and B, and use the letters "T" and
        "S" for the sequence lengths.
      scratch: shapes of the float32 accumulators.
      tiles: largest number of queries and keys per block.
      by_key: if True, results belong to blocks of keys and are summed over queries and
        the heads of a group. If False, they belong to queries and are summed over keys.

    Returns:
      A dict of arrays with leading R and B, padded to whole blocks.
    """
    T, N = arrays["query"].shape[2:4]
    S, K = arrays["key"].shape[2:4]
    R, B = (max(x.shape[axis] for x in arrays.values()) for axis in (0, 1))
    size = {"T": tile(T, tiles[0]), "S": tile(S, tiles[1])}
    counts = {"T": pl.cdiv(T, size["T"]), "S": pl.cdiv(S, size["S"])}
    padded = {axis: size[axis] * counts[axis] for axis in "TS"}
    bounds, many = _bounds(arrays, size, by_key)
    arrays = lay_out(arrays, T, padded)
    num_keys = S if padded["S"] > S and "key_ids" not in arrays else None
    group = N // K

    outer, inner = ("S", "T") if by_key else ("T", "S")

    def place(r, b, head, block, step, *bounds):
        """Return the block indices of a grid step, and whether it has work."""
        index = jax.lax.rem(step, np.int32(counts[inner]))
        limits = masks.query_bounds if by_key else masks.key_bounds
        start, stop = limits(
            block * size[outer],
            (block + 1) * size[outer] - 1,
            T if by_key else S,
            is_causal=problem.is_causal,
            local_window_size=problem.local_window_size,
        )
        low = jax.lax.div(jnp.int32(start), np.int32(size[inner]))
        high = jax.lax.div(jnp.int32(stop - 1), np.int32(size[inner]))
        if bounds:
            at = (r * many[0] + b * many[1]) * counts[outer] + block
            low = jnp.maximum(low, bounds[0][at])
            high = jnp.minimum(high, bounds[1][at])
        live = (low <= index) & (index <= high)
        index = jnp.maximum(jnp.minimum(index, high), 0)
        index = jnp.maximum(index, jnp.minimum(low, counts[inner] - 1))
        indices = {"R": r, "B": b, outer: block, inner: index}
        if by_key:
            n = head * group + jax.lax.div(step, np.int32(counts["T"]))
            return {**indices, "N": n, "K": head}, live
        return {**indices, "N": head, "K": jax.lax.div(head, np.int32(group))}, live

    def spec(name, shape):
        axes = AXES[name]

        def index_map(*grid):
            indices, _ = place(*grid)
            return tuple(
                indices[axis] if axis in indices and length > 1 else 0
                for axis, length in zip(axes, shape, strict=True)
            )

        block = [
            None if axis in "RBNK" else size.get(axis, length)
            for axis, length in zip(axes, shape, strict=True)
        ]
        return pl.BlockSpec(tuple(block), index_map)

    def body(*refs):
        *limits, inputs, results = refs[: len(bounds) + 2]
        scratch = refs[len(bounds) + 2 :]
        step, steps = pl.program_id(4), pl.num_programs(4)
        indices, live = place(*map(pl.program_id, range(5)), *limits)
        block = Block(indices["T"] * size["T"], indices["S"] * size["S"], num_keys)
        start, update, finish = kernel(problem, block, {**inputs, **results}, scratch)
        pl.when(step == 0)(start)
        pl.when(live)(update)
        pl.when(step == steps - 1)(finish)

    shapes = {
        name: (R, B, *(padded.get(axis, axis) for axis in shape))
        for name, (shape, _) in outputs.items()
    }
    steps = counts[inner] * (group if by_key else 1)
    parallel, arbitrary = pltpu.PARALLEL, pltpu.ARBITRARY
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(bounds),
            grid=(R, B, K if by_key else N, counts[outer], steps),
            in_specs=[{name: spec(name, x.shape) for name, x in arrays.items()}],
            out_specs={name: spec(name, shape) for name, shape in shapes.items()},
            scratch_shapes=[
                pltpu.VMEM(tuple(size.get(x, x) for x in shape), jnp.float32)
                for shape in scratch
            ],
        ),
        out_shape={
            name: varying_like(arrays, shapes[name], dtype)
            for name, (_, dtype) in outputs.items()
        },
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=(parallel, parallel, parallel, parallel, arbitrary),
            vmem_limit_bytes=VMEM,
        ),
        interpret=problem.interpret,
        name=f"attention_{kernel.__name__}",
    )(*bounds, arrays)


def lay_out(arrays, T, padded):
    """Transpose arrays to the axes of `AXES`, and pad them to whole blocks."""
    result = {}
    for name, x in arrays.items():
        if name in ("mask", "bias"):
            suffix, x = _split_map(x, T)
            name += suffix
            if name == "mask":
                x = x.astype(jnp.int8)
            elif suffix:
                x = x.astype(jnp.float32)
        elif name in ("highest", "confidence", "delta", "dropout_keys"):
            x = jnp.swapaxes(x, 2, 3)[:, :, :, None]
        elif name == "alibi_slopes":
            x = x[..., None, None]
        elif name in ("query_ids", "key_ids"):
            x = x[:, :, None]
        else:
            x = x.transpose(0, 1, 3, 4, 2)
        fill = FILL.get(name, 0)
        sizes = zip(AXES[name], x.shape, strict=True)
        widths = [(0, padded.get(axis, n) - n) for axis, n in sizes]
        result[name] = jnp.pad(x, widths, constant_values=fill)
    return result


def _split_map(x, T):
    """Reduce a map that is broadcast over T or S to a row, and return its suffix."""
    if x.shape[-1] > 1 and x.shape[-2] > 1:
        return "", x
    if x.shape[-1] > 1:
        return "_of_keys", x
    x = jnp.swapaxes(x, -1, -2)
    return "_of_queries", jnp.broadcast_to(x, (*x.shape[:-1], T))


def _bounds(arrays, size, by_key):
    """Find the range of inner blocks whose ids can match each outer block's ids.

    Returns:
      The first and the last inner block per outer block, as flat int32 arrays, and
      their strides along R and B, counted in rows of outer blocks. Without ids, an
      empty list and None.
    """
    if "query_ids" not in arrays:
        return [], None
    query_low, query_high = _range(arrays["query_ids"], size["T"], EXCLUDED_QUERY)
    key_low, key_high = _range(arrays["key_ids"], size["S"], EXCLUDED_KEY)
    live = (query_low[..., None] <= key_high[..., None, :]) & (
        key_low[..., None, :] <= query_high[..., None]
    )
    if by_key:
        live = live.swapaxes(-1, -2)
    R, B, _, blocks = live.shape
    some = live.any(-1)
    first = jnp.where(some, live.argmax(-1), blocks)
    last = jnp.where(some, blocks - 1 - live[..., ::-1].argmax(-1), -1)
    strides = (B if R > 1 else 0, 1 if B > 1 else 0)
    return [jnp.int32(x).ravel() for x in (first, last)], strides


def _range(ids, size, excluded):
    """Return each block's smallest and largest id; an empty range if all excluded."""
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, -ids.shape[2] % size)), "edge")
    ids = ids.reshape(*ids.shape[:2], -1, size)
    limits = np.iinfo(np.int32)
    low = jnp.where(ids == excluded, limits.max, ids).min(-1)
    high = jnp.where(ids == excluded, limits.min, ids).max(-1)
    return low, high
