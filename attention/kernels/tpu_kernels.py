"""The kernels of `kernels.tpu`, each for one block of queries and keys.

Positions lie along lanes and head sizes along sublanes: queries `H T`, keys `H S`,
values `V S`, logits `S T`. So a head of size 8 costs memory and bandwidth for 8
elements, not for a register's 128 lanes; per-query values are rows, which need no
broadcast across lanes; and the softmax reduces over sublanes, without shuffles.

A kernel takes its inputs and outputs as a dict of references, and returns three
functions to run before the first block, in every block, and after the last. The method
is that of Dao, FlashAttention-2 (2023), arXiv:2307.08691.
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
    """Static parameters of the kernels."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    interpret: bool
    dropout_rate: float = 0.0


class Block(NamedTuple):
    """Start of a block, and the number of keys if the block may extend past them."""

    row: jax.Array
    column: jax.Array
    num_keys: int | None


def forward(problem, block, refs, scratch):
    """Compute `out`, and per query the `highest` logit and `confidence`.

    `confidence` is the largest weight. The online softmax rescales its sums whenever a
    larger logit appears.
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
        seen = total[...] != 0  # True for NaN as well
        divisor = jnp.where(seen, total[...], 1)
        refs["out"][...] = (out[...] / divisor).astype(refs["out"].dtype)
        refs["highest"][...] = highest[...]
        refs["confidence"][...] = jnp.where(seen, 1 / divisor, 0)

    return start, update, finish


def statistics(problem, block, refs, scratch):
    """Compute `highest` and `out`, and in `rows` the fields of `HeadStatistics`."""
    highest, total, sums, out = scratch
    entropy, confidence, distance, previous, current, following, max_logit = (
        slice(i, i + 1) for i in range(len(HeadStatistics._fields))
    )
    shares = ((previous, -1), (current, 0), (following, 1))

    def start():
        highest[...] = jnp.full(highest.shape, masks.LOWEST, F32)
        total[...] = jnp.zeros(total.shape, F32)
        sums[...] = jnp.zeros(sums.shape, F32)
        out[...] = jnp.zeros(out.shape, F32)

    def update():
        logits = _logits(problem, block, refs)
        before, mass = highest[...], total[...]
        exponentials, decay = _online_softmax(logits, highest, total)
        # Logits are relative to the maximum, to avoid cancellation of large numbers.
        sums[entropy, :] += (before - highest[...]) * mass
        sums[...] = sums[...] * decay
        relative = jnp.where(exponentials > 0, logits - highest[...], 0)
        sums[entropy, :] += _sum(exponentials * relative)
        row, column = _indices(block, logits.shape)
        offset = column - row
        sums[distance, :] += _sum(exponentials * jnp.abs(offset).astype(F32))
        for place, wanted in shares:
            sums[place, :] += _sum(jnp.where(offset == wanted, exponentials, 0))
        kept = _dropped(problem, block, refs, exponentials)
        _add_values(out, refs["value"][...], kept, decay)

    def finish():
        seen = total[...] != 0  # True for NaN as well
        divisor = jnp.where(seen, total[...], 1)
        mean = sums[...] / divisor
        rows = refs["rows"]
        rows[...] = mean
        rows[entropy, :] = jnp.log(divisor) - mean[entropy]
        rows[confidence, :] = jnp.where(seen, 1 / divisor, 0)
        rows[max_logit, :] = jnp.where(seen, highest[...], 0)
        refs["highest"][...] = highest[...]
        refs["out"][...] = (out[...] / divisor).astype(refs["out"].dtype)

    return start, update, finish


def query_gradient(problem, block, refs, scratch):
    """Compute `query_gradient` of a block of queries, summed over the keys."""
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
    """Compute the key and value gradients of a block, summed over the queries."""
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
    """Compute a block's weights after dropout, and the gradient of its scaled logits.

    The weights are not computed from the log-sum-exp: if it is large, rounding it loses
    the total.
    """
    exponentials = jnp.exp(_logits(problem, block, refs) - refs["highest"][...])
    weights = exponentials * refs["confidence"][...]
    products = _dot(refs["value"][...], refs["out_gradient"][...], 0, 0)
    products = _dropped(problem, block, refs, products)
    logits_gradient = weights * (products - refs["delta"][...])
    return _dropped(problem, block, refs, weights), logits_gradient


def _dropped(problem, block, refs, weights):
    """Apply dropout to a block of weights, keys by queries, or of their gradients."""
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
    """Compute scaled, biased logits, keys by queries; -inf where masked.

    -inf is safe because only finite maxima are subtracted from it.
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
    """Yield the given parts of a map, as float32 that broadcasts to keys by queries."""
    if name in refs:
        yield refs[name][...].astype(F32).T
    if f"{name}_of_queries" in refs:
        yield refs[f"{name}_of_queries"][...]
    if f"{name}_of_keys" in refs:
        yield _column(refs[f"{name}_of_keys"][...])


def _column(row):
    # Mosaic transposes whole registers; a single row would have to be shuffled.
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def _indices(block, shape):
    """Return the query index and the key index of every logit."""
    row = block.row + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    column = block.column + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return row, column


def _sum(array):
    return array.sum(0, keepdims=True)


def _dot(a, b, axis_of_a, axis_of_b):
    """Contract one axis each, in full precision for float32; accumulate in float32."""
    return jax.lax.dot_general(
        a,
        b,
        (((axis_of_a,), (axis_of_b,)), ((), ())),
        precision=Precision.HIGHEST if a.dtype == F32 else Precision.DEFAULT,
        preferred_element_type=F32,
    )
