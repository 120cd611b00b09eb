"""The kernels of `kernels.tpu`: what they do with one block of queries and of keys.

Positions lie along the lanes and head sizes along the sublanes: queries `H T`, keys
`H S`, values `V S`, logits `S T`. So a head of 8 costs memory and bandwidth for 8, not
for a register's 128 lanes; what is known of a query is a row, with nothing to broadcast
across lanes; and the softmax reduces over sublanes, which needs no shuffles.

A kernel gets its inputs and outputs as dicts of references and returns what to do
before the first block, in each, and after the last. The method is the one of Dao,
FlashAttention-2 (2023), arXiv:2307.08691.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision

from headcount.attention import dropout, masks
from headcount.attention.statistics import HeadStatistics

LANES = 128
F32 = jnp.float32


class Problem(NamedTuple):
    """What the kernels are compiled for."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    interpret: bool
    dropout_rate: float = 0.0


class Block(NamedTuple):
    """Where a block begins, and where the keys end if it may reach beyond them."""

    row: jax.Array
    column: jax.Array
    num_keys: int | None


def forward(problem, block, refs, scratch):
    """`out`, and of each row the `highest` logit and `confidence`, the largest weight.

    The softmax is rescaled whenever a larger logit appears.
    """
    highest, total, out = scratch

    def start():
        highest[...] = jnp.full(highest.shape, masks.LOWEST, F32)
        total[...] = jnp.zeros(total.shape, F32)
        out[...] = jnp.zeros(out.shape, F32)

    def update():
        logits = _logits(problem, block, refs)
        exponentials, decay = _online_softmax(logits, highest, total)
        kept = _dropped(problem, block, refs, exponentials)
        _add_values(out, refs["value"][...], kept, decay)

    def finish():
        seen = total[...] > 0
        divisor = jnp.where(seen, total[...], 1)
        refs["out"][...] = (out[...] / divisor).astype(refs["out"].dtype)
        refs["highest"][...] = highest[...]
        refs["confidence"][...] = jnp.where(seen, 1 / divisor, 0)

    return start, update, finish


def statistics(problem, block, refs, scratch):
    """`highest`, and in `rows` the fields of `HeadStatistics` in their order.

    And `out`, as of `forward`, if there are values.
    """
    highest, total, sums, *out = scratch
    entropy, confidence, distance, previous, current, following, max_logit = (
        slice(i, i + 1) for i in range(len(HeadStatistics._fields))
    )
    shares = ((previous, -1), (current, 0), (following, 1))

    def start():
        highest[...] = jnp.full(highest.shape, masks.LOWEST, F32)
        total[...] = jnp.zeros(total.shape, F32)
        sums[...] = jnp.zeros(sums.shape, F32)
        for accumulator in out:
            accumulator[...] = jnp.zeros(accumulator.shape, F32)

    def update():
        logits = _logits(problem, block, refs)
        before, mass = highest[...], total[...]
        exponentials, decay = _online_softmax(logits, highest, total)
        # The logits count from the maximum, lest two large numbers be subtracted.
        sums[entropy, :] += (before - highest[...]) * mass
        sums[...] = sums[...] * decay
        relative = jnp.where(exponentials > 0, logits - highest[...], 0)
        sums[entropy, :] += _sum(exponentials * relative)
        row, column = _indices(block, logits.shape)
        offset = column - row
        sums[distance, :] += _sum(exponentials * jnp.abs(offset).astype(F32))
        for place, wanted in shares:
            sums[place, :] += _sum(jnp.where(offset == wanted, exponentials, 0))
        for accumulator in out:
            kept = _dropped(problem, block, refs, exponentials)
            _add_values(accumulator, refs["value"][...], kept, decay)

    def finish():
        seen = total[...] > 0
        divisor = jnp.where(seen, total[...], 1)
        mean = sums[...] / divisor
        rows = refs["rows"]
        rows[...] = mean
        rows[entropy, :] = jnp.log(divisor) - mean[entropy]
        rows[confidence, :] = jnp.where(seen, 1 / divisor, 0)
        rows[max_logit, :] = jnp.where(seen, highest[...], 0)
        refs["highest"][...] = highest[...]
        for accumulator in out:
            mean = accumulator[...] / divisor
            refs["out"][...] = mean.astype(refs["out"].dtype)

    return start, update, finish


def query_gradient(problem, block, refs, scratch):
    """`query_gradient` of a block of queries, summed over the keys."""
    (total,) = scratch

    def start():
        total[...] = jnp.zeros(total.shape, F32)

    def update():
        _, logits_gradient = _weights_and_gradient(problem, block, refs)
        key = refs["key"][...]
        total[...] += _dot(key, logits_gradient.astype(key.dtype), 1, 0)

    def finish():
        gradient = total[...] * problem.scale
        refs["query_gradient"][...] = gradient.astype(refs["query_gradient"].dtype)

    return start, update, finish


def key_value_gradient(problem, block, refs, scratch):
    """`key_gradient`, `value_gradient` of a block of keys, summed over the queries."""
    key_total, value_total = scratch

    def start():
        key_total[...] = jnp.zeros(key_total.shape, F32)
        value_total[...] = jnp.zeros(value_total.shape, F32)

    def update():
        weights, logits_gradient = _weights_and_gradient(problem, block, refs)
        query, out_gradient = refs["query"][...], refs["out_gradient"][...]
        value_total[...] += _dot(out_gradient, weights.astype(query.dtype), 1, 1)
        key_total[...] += _dot(query, logits_gradient.astype(query.dtype), 1, 1)

    def finish():
        gradient = key_total[...] * problem.scale
        refs["key_gradient"][...] = gradient.astype(refs["key_gradient"].dtype)
        gradient = value_total[...]
        refs["value_gradient"][...] = gradient.astype(refs["value_gradient"].dtype)

    return start, update, finish


def _weights_and_gradient(problem, block, refs):
    """The weights of the block after dropout, and the gradient by its scaled logits.

    Not from the log-sum-exp: where that is large, the total is lost in its rounding.
    """
    exponentials = jnp.exp(_logits(problem, block, refs) - refs["highest"][...])
    weights = exponentials * refs["confidence"][...]
    products = _dot(refs["value"][...], refs["out_gradient"][...], 0, 0)
    products = _dropped(problem, block, refs, products)
    logits_gradient = weights * (products - refs["delta"][...])
    return _dropped(problem, block, refs, weights), logits_gradient


def _dropped(problem, block, refs, weights):
    """Weights of a block, keys by queries, or gradients by them, after dropout."""
    if "dropout_keys" not in refs:
        return weights
    _, column = _indices(block, weights.shape)
    kept = dropout.kept(refs["dropout_keys"][...], column, problem.dropout_rate)
    return jnp.where(kept, weights * (1 / (1 - problem.dropout_rate)), 0.0)


def _online_softmax(logits, highest, total):
    before = highest[...]
    highest[...] = jnp.maximum(before, logits.max(0, keepdims=True))
    exponentials = jnp.exp(logits - highest[...])
    decay = jnp.exp(before - highest[...])
    total[...] = total[...] * decay + _sum(exponentials)
    return exponentials, decay


def _add_values(out, value, exponentials, decay):
    more = _dot(value, exponentials.astype(value.dtype), 1, 0)
    out[...] = out[...] * decay + more


def _logits(problem, block, refs):
    """Scaled, biased logits, keys by queries; -inf where a query may not attend.

    -inf is safe: it only meets maxima and log-sum-exps, which are finite.
    """
    logits = _dot(refs["key"][...], refs["query"][...], 0, 0) * problem.scale
    for bias in _maps("bias", refs):
        logits = logits + bias
    allowed = [mask != 0 for mask in _maps("mask", refs)]
    if "key_ids" in refs:
        allowed.append(_column(refs["key_ids"][...]) == refs["query_ids"][...])
    row, column = _indices(block, logits.shape)
    if "alibi_slopes" in refs:
        logits -= refs["alibi_slopes"][...] * jnp.abs(column - row).astype(F32)
    allowed.append(
        masks.may_attend(
            row,
            column,
            is_causal=problem.is_causal,
            local_window_size=problem.local_window_size,
            key_value_seq_length=block.num_keys,
        )
    )
    allowed = masks.conjunction(*allowed)
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def _maps(name, refs):
    """What is given of a map, as float32 that broadcasts to keys by queries."""
    if name in refs:
        yield refs[name][...].astype(F32).T
    if f"{name}_of_queries" in refs:
        yield refs[f"{name}_of_queries"][...]
    if f"{name}_of_keys" in refs:
        yield _column(refs[f"{name}_of_keys"][...])


def _column(row):
    # Mosaic transposes whole registers: a row alone would have to be shuffled.
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _indices(block, shape):
    """The index of the query and of the key of every logit."""
    row = block.row + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    column = block.column + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return row, column


def _sum(array):
    return array.sum(0, keepdims=True)


def _dot(a, b, axis_of_a, axis_of_b):
    """Contract one axis each; float32 in full precision, accumulated in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((axis_of_a,), (axis_of_b,)), ((), ())),
        precision=Precision.HIGHEST if a.dtype == F32 else Precision.DEFAULT,
        preferred_element_type=F32,
    )
