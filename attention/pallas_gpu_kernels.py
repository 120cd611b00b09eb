"""The GPU kernels of `attention.pallas_gpu`, written in Pallas for Triton.

Each program holds one outer block and loops over the inner blocks that `Visits` bounds,
whole ones without any mask. `inputs` is a dict of references; what is not in it costs
nothing. Exponentials are powers of two, which is what the hardware has.

The forward pass is the online softmax of Milakov & Gimelshein (2018, arXiv:1805.02867)
in the loop order of FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from headcount.attention import masks
from headcount.attention.pallas_gpu_blocks import Tiles

LOG2E = math.log2(math.e)
# What the backward pass reads of each query.
ROWS = ("highest", "confidence", "delta")


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is known when a kernel is compiled."""

    num_queries: int
    num_keys: int
    head_dim: int
    value_dim: int
    tiles: Tiles
    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    head: bool
    tail: bool
    interpret: bool

    def query_block(self):
        """The program's block of queries: under a causal mask the longest rows first.

        The short ones then fill the gaps at the end.
        """
        i = pl.program_id(0)
        return pl.num_programs(0) - 1 - i if self.is_causal else i


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of the map: its indices, and where its slices lie in the references."""

    head: jax.Array | None  # within its group; None if the references have one head
    rows: jax.Array
    columns: jax.Array
    row_slice: pl.Slice
    column_slice: pl.Slice
    by_key: bool = False

    @property
    def row(self):
        return self.rows[None, :] if self.by_key else self.rows[:, None]

    @property
    def column(self):
        return self.columns[:, None] if self.by_key else self.columns[None, :]

    def oriented(self, queries_by_keys):
        return queries_by_keys.T if self.by_key else queries_by_keys


def forward(inputs, highest_ref, confidence_ref, out_ref, *, problem: Problem):
    """One block of queries: its output, highest logit and largest weight.

    The logit as `_logits` gives it. The largest weight is 1 / the sum of exponentials,
    0 where nothing is seen.
    """
    unit = unit_of(inputs, problem.scale)
    rows, query = _outer(inputs, "query", problem.query_block(), problem)

    def step(j, carry, masked):
        out, highest, total = carry
        block, key, value = _keys(inputs, j, rows, problem, masked)
        logits = _logits(_dot(query, key.T, problem), inputs, block, problem, masked)
        new_highest = jnp.maximum(highest, logits.max(1))
        weights = jnp.exp2((logits - new_highest[:, None]) * unit)
        correction = jnp.exp2((highest - new_highest) * unit)
        total = total * correction + weights.sum(1)
        out = out * correction[:, None]
        out += _dot(weights.astype(value.dtype), value, problem)
        return out, new_highest, total

    out = jnp.zeros(out_ref.shape, jnp.float32)
    out, highest, total = visit(inputs, problem, step, (out, *_no_rows(rows, unit)))
    out /= jnp.where(total > 0, total, 1)[:, None]
    _store(out_ref, out, rows, problem.num_queries, problem.value_dim)
    _store(highest_ref, highest, rows, problem.num_queries)
    _store(confidence_ref, _confidence(total), rows, problem.num_queries)


def statistics(inputs, highest_ref, *refs, problem: Problem):
    """One block of queries: what `statistics.HeadStatistics` lists, in that order.

    Before it the highest logit, and after it the output if there are values, both as
    of `forward`.
    """
    *statistic_refs, out_ref = refs if "value" in inputs else (*refs, None)
    unit = unit_of(inputs, problem.scale)
    rows, query = _outer(inputs, "query", problem.query_block(), problem)

    def step(j, carry, masked):
        highest, total, out, excess, distance, *shares = carry
        block, key, value = _keys(inputs, j, rows, problem, masked)
        logits = _logits(_dot(query, key.T, problem), inputs, block, problem, masked)
        new_highest = jnp.maximum(highest, logits.max(1))
        below = (logits - new_highest[:, None]) * unit
        weights = jnp.exp2(below)
        shift = (highest - new_highest) * unit
        correction = jnp.exp2(shift)
        # The sum of weight x (logit - highest): small numbers, as logits need not be.
        excess = (excess + shift * total) * correction
        excess += jnp.where(weights > 0, weights * below, 0).sum(1)
        offset = block.column - block.row
        distance = distance * correction + (weights * jnp.abs(offset)).sum(1)
        shares = [
            share * correction + jnp.where(offset == wanted, weights, 0).sum(1)
            for share, wanted in zip(shares, (-1, 0, 1), strict=True)
        ]
        total = total * correction + weights.sum(1)
        if out is not None:
            out = out * correction[:, None]
            out += _dot(weights.astype(value.dtype), value, problem)
        return new_highest, total, out, excess, distance, *shares

    zeros = [jnp.zeros(rows.shape, jnp.float32)] * 5
    out = None if out_ref is None else jnp.zeros(out_ref.shape, jnp.float32)
    carry = visit(inputs, problem, step, (*_no_rows(rows, unit), out, *zeros))
    highest, total, out, excess, *sums = carry
    safe = jnp.where(total > 0, total, 1)
    if out is not None:
        out /= safe[:, None]
        _store(out_ref, out, rows, problem.num_queries, problem.value_dim)
    entropy = (jnp.log2(safe) - excess / safe) / LOG2E
    results = entropy, _confidence(total), *(one / safe for one in sums)
    for ref, result in zip(statistic_refs, results, strict=True):
        _store(ref, result, rows, problem.num_queries)
    _store(highest_ref, highest, rows, problem.num_queries)


def query_gradient(inputs, gradient_ref, *, problem: Problem):
    """One block of queries: their gradient."""
    unit = unit_of(inputs, problem.scale)
    rows, query = _outer(inputs, "query", problem.query_block(), problem)
    _, out_gradient = _outer(inputs, "out_gradient", problem.query_block(), problem)
    highest, confidence, delta = (
        _load(inputs[name], rows, problem.num_queries) for name in ROWS
    )

    def step(j, gradient, masked):
        block, key, value = _keys(inputs, j, rows, problem, masked)
        logits = _logits(_dot(query, key.T, problem), inputs, block, problem, masked)
        weights = _weights(logits, unit, highest[:, None], confidence[:, None])
        weight_gradient = _dot(out_gradient, value.T, problem)
        logit_gradient = weights * (weight_gradient - delta[:, None])
        return gradient + _dot(logit_gradient.astype(key.dtype), key, problem)

    gradient = visit(inputs, problem, step, jnp.zeros(query.shape, jnp.float32))
    gradient *= problem.scale
    _store(gradient_ref, gradient, rows, problem.num_queries, problem.head_dim)


def key_value_gradient(inputs, key_gradient_ref, value_gradient_ref, *, problem):
    """One block of keys and values: their gradients, summed over the heads of a group.

    The blocks are transposed, so that the result of a product never has to be.
    """
    unit, tiles = unit_of(inputs, problem.scale), problem.tiles
    columns, key = _outer(inputs, "key", pl.program_id(0), problem)
    _, value = _outer(inputs, "value", pl.program_id(0), problem)

    def one_head(n, carry):
        def step(i, carry, masked):
            key_gradient, value_gradient = carry
            here = pl.ds(i * tiles.queries, tiles.queries)
            rows = i * tiles.queries + _range(tiles.queries)
            size = problem.num_queries if masked else None
            query = _load(inputs["query"].at[here, n], rows, size, problem.head_dim)
            out_gradient = _load(
                inputs["out_gradient"].at[here, n], rows, size, problem.value_dim
            )
            block = Block(n, rows, columns, here, pl.ds(0, tiles.keys), by_key=True)
            logits = _dot(key, query.T, problem)
            logits = _logits(logits, inputs, block, problem, masked)
            # Read late, or they spill. Queries beyond the end: confidence 0, weights 0.
            highest, confidence, delta = (
                _load(inputs[name].at[n, here], rows, size)[None, :] for name in ROWS
            )
            weights = _weights(logits, unit, highest, confidence)
            value_gradient += _dot(
                weights.astype(out_gradient.dtype), out_gradient, problem
            )
            weight_gradient = _dot(value, out_gradient.T, problem)
            logit_gradient = weights * (weight_gradient - delta)
            key_gradient += _dot(logit_gradient.astype(query.dtype), query, problem)
            return key_gradient, value_gradient

        return visit(inputs, problem, step, carry)

    carry = jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32)
    group = inputs["query"].shape[1]
    key_gradient, value_gradient = jax.lax.fori_loop(0, group, one_head, carry)
    key_gradient *= problem.scale
    _store(key_gradient_ref, key_gradient, columns, problem.num_keys, problem.head_dim)
    _store(
        value_gradient_ref, value_gradient, columns, problem.num_keys, problem.value_dim
    )


def visit(inputs, problem, step, carry):
    """Run `step` over the inner blocks: masked ones, whole ones, masked ones."""
    start, whole_start, whole_stop, stop = (inputs["bounds"][k] for k in range(4))

    def masked(index, carry):
        return step(index, carry, masked=True)

    def whole(index, carry):
        return step(index, carry, masked=False)

    if "mask" in inputs:
        return jax.lax.fori_loop(start, stop, masked, carry)
    if problem.head:
        carry = jax.lax.fori_loop(start, whole_start, masked, carry)
    carry = jax.lax.fori_loop(whole_start, whole_stop, whole, carry)
    if problem.tail:
        carry = jax.lax.fori_loop(whole_stop, stop, masked, carry)
    return carry


def _outer(inputs, name, index, problem):
    """Indices and content of the program's own block of an input."""
    by_key = name in ("key", "value")
    tile = problem.tiles.keys if by_key else problem.tiles.queries
    size = problem.num_keys if by_key else problem.num_queries
    width = problem.head_dim if name in ("query", "key") else problem.value_dim
    indices = index * tile + _range(tile)
    return indices, _load(inputs[name], indices, size, width)


def _keys(inputs, j, rows, problem, masked):
    """The block of the map, the keys and (where there are any) the values number j."""
    tile = problem.tiles.keys
    here = pl.ds(j * tile, tile)
    columns = j * tile + _range(tile)
    size = problem.num_keys if masked else None
    block = Block(None, rows, columns, pl.ds(0, rows.size), here)
    key = _load(inputs["key"].at[here, :], columns, size, problem.head_dim)
    value = None
    if "value" in inputs:
        value = _load(inputs["value"].at[here, :], columns, size, problem.value_dim)
    return block, key, value


def unit_of(inputs, scale):
    """What `_logits` leaves to multiply by, for when the highest is subtracted.

    So large logits are not rounded once more, differently forward and backward. Only a
    positive scale may wait until after the maximum, and with a bias it cannot.
    """
    wait = "bias" not in inputs and scale > 0
    return scale * LOG2E if wait else LOG2E


def _logits(products, inputs, block, problem, masked):
    """Products of queries and keys -> logits, -inf where none may attend.

    In the unit of which `unit_of` tells the powers of two.
    """
    logits = products
    if unit_of(inputs, problem.scale) == LOG2E:
        logits = logits * problem.scale
    if "bias" in inputs:
        bias = _map_block(inputs["bias"], block, problem).astype(jnp.float32)
        logits = logits + bias
    if not masked:
        return logits
    segments = {}
    if "query_segment_ids" in inputs:
        row_segments = _load(
            inputs["query_segment_ids"].at[block.row_slice],
            block.rows,
            problem.num_queries,
        )
        column_segments = _load(
            inputs["key_value_segment_ids"].at[block.column_slice],
            block.columns,
            problem.num_keys,
        )
        like = dataclasses.replace(block, rows=row_segments, columns=column_segments)
        segments = {"query_segment_id": like.row, "key_value_segment_id": like.column}
    allowed = masks.may_attend(
        block.row,
        block.column,
        is_causal=problem.is_causal,
        local_window_size=problem.local_window_size,
        query_seq_length=_scalar(inputs, "query_seq_lengths"),
        key_value_seq_length=_scalar(inputs, "key_value_seq_lengths"),
        **segments,
    )
    inside = None
    if problem.num_keys % problem.tiles.keys:
        inside = block.column < problem.num_keys
    given = None
    if "mask" in inputs:
        given = _map_block(inputs["mask"], block, problem).astype(bool)
    allowed = masks.conjunction(allowed, inside, given)
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _map_block(ref, block, problem):
    """The block of a bias or mask, each of its axes full size or 1."""
    *heads, num_rows, num_columns = ref.shape
    first = pl.ds(0, 1)
    at = (
        block.row_slice if num_rows > 1 else first,
        block.column_slice if num_columns > 1 else first,
    )
    inside = masks.conjunction(
        block.rows[:, None] < problem.num_queries if num_rows > 1 else None,
        block.columns[None, :] < problem.num_keys if num_columns > 1 else None,
    )
    other = None if inside is None else jnp.zeros((), ref.dtype)
    ref = ref.at[block.head, *at] if heads else ref.at[at]
    return block.oriented(plgpu.load(ref, mask=inside, other=other))


def _dot(a, b, problem):
    """The product in float32; of float32 with three tf32 products, exact to 1e-6."""
    if a.dtype != jnp.float32:
        precision = None
    elif problem.interpret:
        precision = jax.lax.Precision.HIGHEST
    else:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return plgpu.dot(a, b, precision=precision)


def _no_rows(rows, unit):
    """Highest logit and total weight before any key is seen."""
    # Finite, not -inf, also when multiplied: -inf minus it is then -inf, not a NaN.
    lowest = masks.LOWEST / max(1.0, unit)
    return jnp.full(rows.shape, lowest, jnp.float32), jnp.zeros(rows.shape, jnp.float32)


def _confidence(total):
    """The largest weight of a row; 0 of one that sees nothing."""
    seen = total > 0
    return jnp.where(seen, 1 / jnp.where(seen, total, 1), 0)


def _weights(logits, unit, highest, confidence):
    """The softmax again, from what the forward pass kept of each row.

    Not from the log-sum-exp: where that is large, the total is lost in its rounding.
    """
    return jnp.exp2((logits - highest) * unit + jnp.log2(confidence))


def _range(size):
    return jnp.arange(size, dtype=jnp.int32)


def _scalar(inputs, name):
    return inputs[name][...] if name in inputs else None


def _inside(indices, size, shape, width):
    """Which elements of a block lie within the array; None if all of them do."""
    rows = None if size is None else indices < size
    if len(shape) == 1:
        return rows
    return masks.conjunction(
        None if rows is None else rows[:, None],
        None if width == shape[1] else _range(shape[1])[None, :] < width,
    )


def _load(ref, indices, size, width=None):
    """A block, 0 beyond `size` (None: nothing is) and `width`."""
    mask = _inside(indices, size, ref.shape, width)
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0)


def _store(ref, block, indices, size, width=None):
    mask = _inside(indices, size, ref.shape, width)
    plgpu.store(ref, block.astype(ref.dtype), mask=mask)
