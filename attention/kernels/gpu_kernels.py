"""GPU kernels: Pallas through Mosaic GPU, for compute capability 9.0 (Hopper).

Each program computes one outer block of the T x S map and loops over the inner blocks
that `Visits` bounds; blocks that no mask touches skip masking. The kernels use the
online softmax of Milakov & Gimelshein (2018, arXiv:1805.02867) in the loop order of
FlashAttention-2 (Dao 2023, arXiv:2307.08691), with warp specialization as in
FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608): one warpgroup of a program
fetches, the others compute 64 rows each. Fetched blocks pass through rings of slots in
shared memory; each slot has a "filled" and a "free" barrier. Exponentials are powers of
two, as in hardware.

In interpret mode, fetches, rings, barriers and masks are simulated. Matrix products are
ordinary ones of any dtype, because the interpreter lacks wgmma on registers.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from headcount.attention import dropout, masks
from headcount.attention.kernels.gpu_blocks import HEIGHT, Tiles
from headcount.attention.kernels.gpu_rings import (
    fetch,
    fetch_own,
    release,
    store,
    wait,
)

LOG2E = math.log2(math.e)
SUPPLIER = 24  # registers per thread of the warpgroup that fetches
# Values per query that the backward pass reads, stacked as `B N 3 T`.
ROWS = ("highest", "confidence", "delta")
STACKED = ("highest", "log2 of confidence", "delta")
BLOCK = plgpu.Layout.WGMMA
# Layouts of vectors with one number per row, and per column, of a block.
OF_ROWS, OF_COLUMNS = BLOCK.reduce(1), BLOCK.reduce(0)


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static parameters of a kernel."""

    num_queries: int
    num_keys: int
    head_dim: int
    value_dim: int
    tiles: Tiles
    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    head: bool  # see `gpu_blocks.Visits`
    tail: bool
    interpret: bool
    dropout_rate: float


class Place(NamedTuple):
    """The part of the map that a program and one of its warpgroups compute."""

    batch: jax.Array
    head: jax.Array  # query head, or key head in `key_value_gradient`
    warpgroup: jax.Array
    first: jax.Array  # the warpgroup's first row
    start: jax.Array  # the first inner block
    count: jax.Array  # number of inner blocks
    by_key: bool  # rows are keys, and inner blocks are queries


def forward(inputs, outputs, scratch, problem: Problem):
    """Compute a block of queries: output, highest logit, confidence, statistics.

    Only what is in `outputs` is computed.
    """
    _divide(_forward, _supply_keys, inputs, outputs, scratch, problem)


def _forward(inputs, outputs, scratch, problem, place):
    unit = exponent_unit(problem.scale)
    query = _own(inputs, scratch, "query", place)
    row_ids = _ids(inputs, "query", place.first, HEIGHT, OF_ROWS, place, problem)
    row_keys = _row_keys(
        inputs, place.head, place.first, HEIGHT, OF_ROWS, place, problem
    )
    looking = "entropy" in outputs

    def step(j, carry, masked):
        highest, total, out, excess, distance, *shares = carry
        key, slot = wait(scratch["key"], j - place.start)
        logits = _product(query, key, problem, transposed=True)
        release(scratch["key"], slot, loaded=problem.interpret)
        logits = _logits(logits, inputs, row_ids, j, place.head, place, problem, masked)
        new_highest = jnp.maximum(highest, logits.max(1))
        below = (logits - _of_rows(new_highest, logits)) * unit
        weights = jnp.exp2(below)
        shift = (highest - new_highest) * unit
        correction = jnp.exp2(shift)
        if looking:
            excess = (excess + shift * total) * correction
            excess += jnp.where(weights > 0, weights * below, 0.0).sum(1)
            row, column = _indices(logits.shape, j, place, problem)
            offset = column - row
            far = weights * jnp.abs(offset).astype(jnp.float32)
            distance = distance * correction + far.sum(1)
            shares = [
                share * correction + jnp.where(offset == wanted, weights, 0.0).sum(1)
                for share, wanted in zip(shares, (-1, 0, 1), strict=True)
            ]
        total = total * correction + weights.sum(1)
        out = out * _of_rows(correction, out)
        kept = _dropped(weights, row_keys, j, place, problem)
        value, slot = wait(scratch["value"], j - place.start)
        out = _add_product(out, kept.astype(query.dtype), value, problem)
        release(scratch["value"], slot, loaded=problem.interpret)
        return new_highest, total, out, excess, distance, *shares

    def rows(number):
        return _full((HEIGHT,), number, OF_ROWS, problem)

    out = _full((HEIGHT, scratch["out"].shape[-1]), 0, BLOCK, problem)
    sums = [rows(0) if looking else None for _ in range(5)]
    # finite, not -inf: the difference of two -inf would be NaN
    carry = rows(masks.LOWEST / max(1.0, unit)), rows(0), out, *sums
    carry = visit(inputs, problem, step, carry)
    highest, total, out, excess, *sums = carry
    seen = total != 0  # True for NaN as well
    confidence = 1 / jnp.where(seen, total, 1.0)
    out = out * _of_rows(confidence, out)
    _store(outputs["out"], out, scratch["out"], place)
    results = {"highest": highest}
    if looking:
        # The outputs and these sums are in the order of `HeadStatistics`.
        names = [x for x in outputs if x not in ("highest", "confidence", "out")]
        entropy = (excess * confidence + jnp.log2(confidence)) * (-1 / LOG2E)
        sums = [entropy, *(one * confidence for one in sums)]
        results |= dict(zip(names, sums, strict=True))
    results["confidence"] = jnp.where(seen, confidence, 0.0)
    for name, result in results.items():
        outputs[name][place.batch, place.head, pl.ds(place.first, HEIGHT)] = result


def visit(inputs, problem, step, carry):
    """Run `step` over the inner blocks: first masked, then whole, then masked ones."""
    start, whole_start, whole_stop, stop = (inputs["bounds"][k] for k in range(4))

    def masked(index, carry):
        return step(index, carry, masked=True)

    def whole(index, carry):
        return step(index, carry, masked=False)

    if problem.head:
        carry = lax.fori_loop(start, whole_start, masked, carry)
    carry = lax.fori_loop(whole_start, whole_stop, whole, carry)
    if problem.tail:
        carry = lax.fori_loop(whole_stop, stop, masked, carry)
    return carry


def exponent_unit(scale: float) -> float:
    """Return the factor from the kernels' logits to exponents of 2.

    Applying it after the maximum is subtracted avoids an extra rounding of large
    logits, which would differ between forward and backward. It includes the scale if
    that is positive; other scales would change which logit is the maximum.
    """
    return scale * LOG2E if scale > 0 else LOG2E


def query_gradient(inputs, outputs, scratch, problem: Problem):
    """Compute the gradient of a block of queries."""
    _divide(_query_gradient, _supply_keys, inputs, outputs, scratch, problem)


def _query_gradient(inputs, outputs, scratch, problem, place):
    unit = exponent_unit(problem.scale)
    query = _own(inputs, scratch, "query", place)
    out_gradient = _own(inputs, scratch, "out_gradient", place)
    row_ids = _ids(inputs, "query", place.first, HEIGHT, OF_ROWS, place, problem)
    row_keys = _row_keys(
        inputs, place.head, place.first, HEIGHT, OF_ROWS, place, problem
    )
    stacked = inputs["stacked"].at[place.batch, place.head]
    highest, log_confidence, delta = (
        _vector(stacked.at[k, pl.ds(place.first, HEIGHT)], OF_ROWS, problem)
        for k in range(len(STACKED))
    )

    def step(j, gradient, masked):
        key, slot = wait(scratch["key"], j - place.start)
        logits = _product(query, key, problem, transposed=True)
        logits = _logits(logits, inputs, row_ids, j, place.head, place, problem, masked)
        below = (logits - _of_rows(highest, logits)) * unit
        weights = jnp.exp2(below + _of_rows(log_confidence, logits))
        value, _ = wait(scratch["value"], j - place.start)
        weight_gradient = _product(out_gradient, value, problem, transposed=True)
        release(scratch["value"], slot, loaded=problem.interpret)
        weight_gradient = _dropped(weight_gradient, row_keys, j, place, problem)
        logit_gradient = weights * (weight_gradient - _of_rows(delta, logits))
        logit_gradient = logit_gradient.astype(query.dtype)
        gradient = _add_product(gradient, logit_gradient, key, problem)
        release(scratch["key"], slot, loaded=problem.interpret)
        return gradient

    gradient = _full((HEIGHT, query.shape[-1]), 0, BLOCK, problem)
    gradient = visit(inputs, problem, step, gradient) * problem.scale
    _store(outputs["query"], gradient, scratch["query"].buffer, place)


def key_value_gradient(inputs, outputs, scratch, problem: Problem):
    """Compute the gradients of a block of keys and values, summed over their group.

    Blocks of the map are transposed, so that no operand of a product has to be.
    """
    _divide(_key_value_gradient, _supply_queries, inputs, outputs, scratch, problem)


def _key_value_gradient(inputs, outputs, scratch, problem, place):
    unit = exponent_unit(problem.scale)
    key = _own(inputs, scratch, "key", place)
    value = _own(inputs, scratch, "value", place)
    column_ids = _ids(inputs, "key_value", place.first, HEIGHT, OF_ROWS, place, problem)

    def one_head(n, carry):
        def step(i, carry, masked):
            key_gradient, value_gradient = carry
            turn = n * place.count + i - place.start
            query, slot = wait(scratch["query"], turn)
            logits = _product(key, query, problem, transposed=True)
            head = place.head * _group(inputs) + n
            logits = _logits(
                logits, inputs, column_ids, i, head, place, problem, masked
            )
            size = logits.shape[1]
            row_keys = _row_keys(
                inputs, head, i * size, size, OF_COLUMNS, place, problem
            )
            stacked, _ = wait(scratch["stacked"], turn)
            highest, log_confidence, delta = (
                _of_columns(_vector(stacked.at[k], OF_COLUMNS, problem), logits)
                for k in range(len(STACKED))
            )
            release(scratch["stacked"], slot, loaded=True)
            weights = jnp.exp2((logits - highest) * unit + log_confidence)
            out_gradient, _ = wait(scratch["out_gradient"], turn)
            kept = _dropped(weights, row_keys, i, place, problem)
            value_gradient = _add_product(
                value_gradient, kept.astype(key.dtype), out_gradient, problem
            )
            weight_gradient = _product(value, out_gradient, problem, transposed=True)
            weight_gradient = _dropped(weight_gradient, row_keys, i, place, problem)
            release(scratch["out_gradient"], slot, loaded=problem.interpret)
            logit_gradient = (weights * (weight_gradient - delta)).astype(key.dtype)
            key_gradient = _add_product(key_gradient, logit_gradient, query, problem)
            release(scratch["query"], slot, loaded=problem.interpret)
            return key_gradient, value_gradient

        return visit(inputs, problem, step, carry)

    carry = tuple(
        _full((HEIGHT, array.shape[-1]), 0, BLOCK, problem) for array in (key, value)
    )
    carry = lax.fori_loop(jnp.int32(0), _group(inputs), one_head, carry)
    key_gradient, value_gradient = carry
    key_gradient *= problem.scale
    _store(outputs["key"], key_gradient, scratch["key"].buffer, place)
    _store(outputs["value"], value_gradient, scratch["value"].buffer, place)


def _divide(compute, supply, inputs, outputs, scratch, problem):
    """Run `supply` on a program's last warpgroup, `compute` on the others."""
    by_key = supply is _supply_queries
    place, bounds = _place(inputs, problem, by_key)
    inputs = dict(inputs, bounds=bounds)
    tile = problem.tiles.keys if by_key else problem.tiles.queries
    computing = tile // HEIGHT

    @pl.when(place.warpgroup < computing)
    def _():
        if computing > 1:  # a single warpgroup already has the maximum
            plgpu.set_max_registers(_registers(computing), action="increase")
        compute(inputs, outputs, scratch, problem, place)

    @pl.when(place.warpgroup == computing)
    def _():
        if computing > 1:
            plgpu.set_max_registers(SUPPLIER, action="decrease")
        supply(inputs, scratch, problem, place)


def _registers(computing):
    """Return the registers per computing thread, a multiple of 8."""
    return (512 - SUPPLIER) // computing // 8 * 8


def _place(inputs, problem, by_key):
    """Return this program's `Place`, and its loop bounds: see `Visits`."""
    many, blocks, _ = inputs["bounds"].shape
    # Blocks of a head are adjacent programs, because they read the same keys.
    program, block = _divmod(lax.axis_index("program"), blocks)
    heads = inputs["key" if by_key else "query"].shape[2]
    batch, head = _divmod(program, heads)
    if problem.is_causal and not by_key:
        # Run the longest rows first, so that short ones fill the gaps at the end.
        block = blocks - 1 - block
    row = batch if many > 1 else 0
    # Adding 0 drops the axes that the type varies over in `jax.shard_map`: other values
    # in a kernel lack them, and a loop's carry needs matching types.
    bounds = [inputs["bounds"][row, block, k] + 0 for k in range(4)]
    warpgroup = lax.axis_index("warpgroup")
    tile = problem.tiles.keys if by_key else problem.tiles.queries
    first = block * tile + warpgroup * HEIGHT
    start, _, _, stop = bounds
    return Place(batch, head, warpgroup, first, start, stop - start, by_key), bounds


def _divmod(number, size):
    return lax.div(number, jnp.int32(size)), lax.rem(number, jnp.int32(size))


def _supply_keys(inputs, scratch, problem, place):
    """Fetch the keys and values of every inner block."""
    tile, head = problem.tiles.keys, lax.div(place.head, _group(inputs))

    def source(name, turn):
        start = (place.start + turn) * tile
        return inputs[name].at[place.batch, pl.ds(start, tile), head]

    rings = {name: scratch[name] for name in ("key", "value")}
    fetch(rings, source, place.count)


def _supply_queries(inputs, scratch, problem, place):
    """Fetch the per-query arrays of every inner block, for each head of the group."""
    tile, group = problem.tiles.queries, _group(inputs)

    def source(name, turn):
        head = place.head * group + lax.div(turn, place.count)
        start = (place.start + lax.rem(turn, place.count)) * tile
        if name == "stacked":
            return inputs[name].at[place.batch, head, :, pl.ds(start, tile)]
        return inputs[name].at[place.batch, pl.ds(start, tile), head]

    rings = {name: scratch[name] for name in ("query", "stacked", "out_gradient")}
    fetch(rings, source, group * place.count)


def _own(inputs, scratch, name, place):
    rows = pl.ds(place.first, HEIGHT)
    source = inputs[name].at[place.batch, rows, place.head]
    return fetch_own(scratch[name], source, place.warpgroup)


def _store(ref, block, buffer, place):
    rows = pl.ds(place.first, HEIGHT)
    ref = ref.at[place.batch, rows, place.head]
    store(ref, block, buffer.at[place.warpgroup])


def _group(inputs):
    """Return the number of query heads per key head."""
    return jnp.int32(inputs["query"].shape[2] // inputs["key"].shape[2])


def _row_keys(inputs, head, start, size, layout, place, problem):
    """Load dropout keys of queries from `start` on; None if there is no dropout."""
    if "dropout_keys" not in inputs:
        return None
    ref = inputs["dropout_keys"].at[place.batch, head, pl.ds(start, size)]
    return _vector(ref, layout, problem)


def _dropped(weights, row_keys, inner, place, problem):
    """Apply dropout to a block of weights, or of their gradients."""
    if row_keys is None:
        return weights
    rows, columns = _indices(weights.shape, inner, place, problem)
    column, spread = (rows, _of_columns) if place.by_key else (columns, _of_rows)
    kept = dropout.kept(spread(row_keys, weights), column, problem.dropout_rate)
    return jnp.where(kept, weights * (1 / (1 - problem.dropout_rate)), 0.0)


def _logits(products, inputs, own_ids, inner, head, place, problem, masked):
    """Convert a block of query-key products to logits, -inf where masked.

    The logits are in the unit of `exponent_unit`. Rows are keys if `place.by_key`.

    Args:
      own_ids: segment ids of the block's rows.
      inner: index of the inner block, which gives the columns.
      head: query head.
      masked: whether the block needs masking.
    """
    if exponent_unit(problem.scale) == LOG2E:
        products = products * problem.scale
    if not masked and "alibi_slopes" not in inputs:
        return products
    rows, columns = _indices(products.shape, inner, place, problem)
    row, column = (columns, rows) if place.by_key else (rows, columns)
    if "alibi_slopes" in inputs:
        distance = jnp.abs(column - row).astype(jnp.float32)
        products -= inputs["alibi_slopes"][head] * distance
    if not masked:
        return products
    segments = {}
    if own_ids is not None:
        kind, size = "query" if place.by_key else "key_value", products.shape[1]
        other_ids = _ids(inputs, kind, inner * size, size, OF_COLUMNS, place, problem)
        ids = _of_rows(own_ids, products), _of_columns(other_ids, products)
        ids = ids[::-1] if place.by_key else ids
        names = "query_segment_id", "key_value_segment_id"
        segments = dict(zip(names, ids, strict=True))
    lengths = {
        name.removesuffix("s"): inputs[name][place.batch]
        for name in ("query_seq_lengths", "key_value_seq_lengths")
        if name in inputs
    }
    allowed = masks.may_attend(
        row,
        column,
        is_causal=problem.is_causal,
        local_window_size=problem.local_window_size,
        **lengths,
        **segments,
    )
    if problem.num_keys % problem.tiles.keys:
        allowed = masks.conjunction(allowed, column < problem.num_keys)
    return products if allowed is None else jnp.where(allowed, products, -jnp.inf)


def _indices(shape, inner, place, problem):
    """Return the indices of a block's rows and columns, each broadcast to the block."""
    if problem.interpret:
        rows, columns = (lax.broadcasted_iota(jnp.int32, shape, k) for k in (0, 1))
    else:
        rows, columns = (
            plgpu.broadcasted_iota(jnp.int32, shape, k, layout=BLOCK) for k in (0, 1)
        )
    return rows + place.first, columns + inner * shape[1]


def _ids(inputs, kind, start, size, layout, place, problem):
    """Load segment ids from `start` on; None if there are none."""
    if f"{kind}_segment_ids" not in inputs:
        return None
    ref = inputs[f"{kind}_segment_ids"]
    return _vector(ref.at[place.batch, pl.ds(start, size)], layout, problem)


def _vector(ref, layout, problem):
    if problem.interpret:
        return ref[...]
    index = () if jax.__version_info__ >= (0, 11) else ((),)
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def _full(shape, number, layout, problem):
    array = jnp.full(shape, number, jnp.float32)
    return array if problem.interpret else plgpu.layout_cast(array, layout)


def _of_rows(vector, block):
    return lax.broadcast_in_dim(vector, block.shape, (0,))


def _of_columns(vector, block):
    return lax.broadcast_in_dim(vector, block.shape, (1,))


def _product(a, b, problem, *, transposed=False):
    """Multiply a and b in float32; b is in shared memory."""
    if problem.interpret:
        b = b[...].T if transposed else b[...]
        a = a if isinstance(a, jax.Array) else a[...]
        return jnp.dot(a, b, precision="highest", preferred_element_type=jnp.float32)
    b = b.T if transposed else b

    def compute(sums):
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(compute, plgpu.ACC((a.shape[0], b.shape[1])))


def _add_product(total, a, b, problem):
    """Return total + a b."""
    if problem.interpret:
        return total + _product(a, b, problem)
    add = pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))
    return add(plgpu.ACC.init(total))
