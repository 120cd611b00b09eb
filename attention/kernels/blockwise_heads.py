"""One key/value head with its group of query heads, block by block: see `blockwise`.

A head is a dict of arrays: query and out_gradient `G T H`, delta and dropout_keys
`G T`, key and value `S H`, mask and bias `G T S` (axes of 1 are broadcast), lengths,
segment ids `T` and `S`, alibi_slopes `G`, and what the forward pass saves: the
exponentials `(G T) S` of a short sequence, the maximum `G T` of a long one. If there is
more than one block, `blocks` holds the indices of the blocks to visit. Within a block,
the queries of the group's heads are concatenated, so every product is of two matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import dropout, masks
from headcount.attention.reference import of_two_features

# Sums per query for the statistics. Dividing them by the total gives the means.
OFFSETS = {"previous": -1, "current": 0, "following": 1}
STATISTICS = ("energy", "distance", *OFFSETS)


class Problem(NamedTuple):
    """Static parameters: hashable, the same for all heads."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    dropout_rate: float
    queries: int  # per block; divides the padded T
    keys: int  # per block; divides the padded S
    short: bool  # whether one block holds the whole map
    one_by_one: bool  # whether to loop over heads
    statistics: bool  # whether to compute the statistics


def forward(problem, head):
    """Compute the forward pass of one key/value head.

    Returns:
      out `G T V` and lse `G T`; then the statistics if `problem.statistics`; then
      1 / total and the maximum. The backward pass needs these two separately: in lse,
      the log of the total can be lost to the rounding of a large maximum.
    """
    dtype = _dtype(head)

    def step(i, j, rows):
        before = {name: _rows(problem, rows, name, i) for name in rows}
        maximum, total = before.pop("maximum"), before.pop("total")
        logits = _logits(problem, head, i, j)
        new = jnp.maximum(logits.max(-1), maximum)
        rescale, exponentials = jnp.exp(maximum - new), _exponentials(logits, new)
        if problem.statistics:
            # Bounded: the product of two very large numbers would be infinite.
            before["energy"] += jnp.maximum(maximum - new, -1e4) * total
        more = _sums(problem, head, exponentials, i, j)
        before["total"] = total
        after = {
            name: x * rescale.reshape(-1, *(1,) * (x.ndim - 1)) + more[name]
            for name, x in before.items()
        }
        after["maximum"] = new
        return {name: _with_rows(problem, rows[name], i, after[name]) for name in rows}

    zeros = jnp.zeros(head["query"].shape[:2], dtype)
    sums = dict.fromkeys(STATISTICS if problem.statistics else (), zeros)
    sums["out"] = jnp.zeros((*zeros.shape, head["value"].shape[-1]), dtype)
    rows = sums | {"maximum": zeros + masks.LOWEST, "total": zeros}
    rows = _visit(problem, head, step, _varying(head, rows))
    maximum, total = rows.pop("maximum"), rows.pop("total")
    return *_results(maximum, total, rows), _reciprocal(total), maximum


def short(problem, head):
    """Compute `forward` for a single block, and the exponentials for its backward.

    XLA's CPU compiler fuses the products, exponentials and sums into one kernel as long
    as no other operations come between them.
    """
    logits = _logits(problem, head, 0, 0)
    maximum = logits.max(-1)
    if (
        not {"bias", "mask", *masks.STRUCTURE}.isdisjoint(head)
        or problem.local_window_size
    ):
        maximum = jnp.maximum(maximum, masks.LOWEST)
    exponentials = _exponentials(logits, maximum)
    sums = _sums(problem, head, exponentials, 0, 0)
    total = sums.pop("total")
    results = _results(maximum, total, sums)
    reciprocal = _reciprocal(total)
    kept = exponentials.astype(head["value"].dtype)
    return *_grouped(problem, (*results, reciprocal)), kept


def _sums(problem, head, exponentials, i, j):
    """Sum a block over its keys: by name, `(G queries)`, and out `(G queries) V`."""
    sums = {}
    if problem.statistics:
        # Compute the exponentials once for all sums below; the energy takes their logs.
        exponentials = jax.lax.optimization_barrier(exponentials)
        G = head["query"].shape[0]
        row = jnp.tile(i * problem.queries + jnp.arange(problem.queries), G)[:, None]
        column = j * problem.keys + jnp.arange(problem.keys)
        logs = jnp.log(exponentials + jnp.finfo(exponentials.dtype).tiny)
        sums["energy"] = (exponentials * logs).sum(-1)
        # Flattened, because XLA's CPU compiler multiplies that faster in a batch.
        distances = exponentials.ravel() * abs(column - row).ravel()
        sums["distance"] = distances.reshape(exponentials.shape).sum(-1)
        for name, offset in OFFSETS.items():
            sums[name] = _diagonal(problem, exponentials, offset, row, column)
    value = _slice(head["value"], 0, j, problem.keys)
    kept = _dropped(problem, head, exponentials, i, j)
    sums["out"] = _dot(kept.astype(value.dtype), value)
    return sums | {"total": exponentials.sum(-1)}


def _results(maximum, total, sums):
    """Return the output, log-sum-exp, and the statistics if requested."""
    reciprocal = _reciprocal(total)
    seen = total != 0  # True for NaN as well
    log_total = jnp.log(jnp.where(seen, total, 1))
    lse = jnp.where(seen, maximum + log_total, masks.EMPTY)
    out = sums["out"] * reciprocal[..., None]
    if "energy" not in sums:
        return out, lse
    # The energy's logits are relative to the maximum, as is log(total).
    entropy = log_total - sums["energy"] * reciprocal
    means = (sums[name] * reciprocal for name in ("distance", *OFFSETS))
    max_logit = jnp.where(seen, maximum, 0)
    return out, lse, entropy, reciprocal, *means, max_logit


def _dropped(problem, head, weights, i, j):
    """Apply dropout to a block of weights, or of their gradients."""
    if "dropout_keys" not in head:
        return weights
    row_key = _rows(problem, head, "dropout_keys", i)[:, None]
    column = jnp.int32(j * problem.keys) + jnp.arange(problem.keys, dtype=jnp.int32)
    kept = dropout.kept(row_key, column[None], problem.dropout_rate)
    return jnp.where(kept, weights * (1 / (1 - problem.dropout_rate)), 0)


def _diagonal(problem, exponentials, offset, row, column):
    """Select the exponentials at column = row + offset, `(G queries)`, else 0."""
    if not problem.short:
        place = row + offset - column[0]
        taken = jnp.take_along_axis(exponentials, place, axis=1, mode="clip")
        return jnp.where((place >= 0) & (place < problem.keys), taken, 0)[:, 0]
    # A strided slice, which is cheap in XLA's CPU compiler; a gather would take a
    # noticeable share of the time of short sequences.
    T, S = problem.queries, problem.keys
    first, last = max(0, -offset), min(T, S - offset)
    rows = exponentials.reshape(-1, T * S)
    if last <= first:
        return jnp.zeros(exponentials.shape[0], exponentials.dtype)
    start = first * (S + 1) + offset
    entries = rows[:, start : start + (last - first - 1) * (S + 1) + 1 : S + 1]
    return jnp.pad(entries, ((0, 0), (first, T - last))).ravel()


def backward(problem, head):
    """Compute the gradients of one key/value head: query, key, value and any bias.

    The gradients of key and value are transposed: H S and V S. The exponentials are not
    normalized; out_gradient and delta include the factor 1 / total instead.
    """
    dtype, scale = _dtype(head), problem.scale

    def step(i, j, gradients):
        query, out_gradient, delta = (
            _rows(problem, head, name, i) for name in ("query", "out_gradient", "delta")
        )
        key, value = (
            _slice(head[name], 0, j, problem.keys) for name in ("key", "value")
        )
        if "exponentials" in head:
            weights = head["exponentials"].astype(dtype)
        else:
            maximum = _rows(problem, head, "maximum", i)
            weights = _exponentials(_logits(problem, head, i, j), maximum)
        weights_gradient = _dot(out_gradient.astype(value.dtype), value, 1)
        weights_gradient = _dropped(problem, head, weights_gradient, i, j)
        logits_gradient = weights * (weights_gradient - delta[:, None])
        if "bias" in gradients:
            more = logits_gradient.reshape(-1, problem.queries, problem.keys)
            bias = _add(gradients["bias"], more, (i, j), problem)
            gradients = gradients | {"bias": bias}
        weights = _dropped(problem, head, weights, i, j).astype(value.dtype)
        logits_gradient = logits_gradient.astype(value.dtype)
        so_far = _rows(problem, gradients, "query", i)
        so_far += _dot(logits_gradient, key) * scale
        # Contracting the rows of both matrices is fastest on CPU.
        key_more = _dot(query.T, logits_gradient) * scale
        value_more = _dot(out_gradient.T.astype(value.dtype), weights)
        return gradients | {
            "query": _with_rows(problem, gradients["query"], i, so_far),
            "key": _add(gradients["key"], key_more, (None, j), problem),
            "value": _add(gradients["value"], value_more, (None, j), problem),
        }

    shapes = {name: head[name].shape for name in ("query", "key", "value")}
    shapes |= {name: shapes[name][::-1] for name in ("key", "value")}
    if "bias" in head:
        shapes["bias"] = head["bias"].shape
    gradients = {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    gradients = _visit(problem, head, step, _varying(head, gradients))
    return tuple(gradients[name] for name in shapes)


def _logits(problem, head, i, j):
    """Compute a block of logits, `(G queries) keys`.

    Masked ones are `masks.EMPTY`, or -inf in a short problem.
    """
    query = _rows(problem, head, "query", i)
    key = _slice(head["key"], 0, j, problem.keys)
    exact = query.dtype == _dtype(head)
    # Scaling the query is faster than scaling logits, but rounds a 16-bit query.
    query, key = of_two_features(query * problem.scale if exact else query, key)
    logits = _dot(query, key, 1)
    logits = logits if exact else logits * problem.scale

    def block(x):
        return _slice(_slice(x, 1, i, problem.queries), 2, j, problem.keys)

    def rows(x):
        """Broadcast to G, queries, keys and merge the first two; no copy for G = 1."""
        if head["query"].shape[0] == 1:
            return x.reshape(x.shape[-2:])
        shape = (head["query"].shape[0], problem.queries, problem.keys)
        return jnp.broadcast_to(x, shape).reshape(logits.shape)

    def ids(name, index, size):
        return _slice(head[name], 0, index, size) if name in head else None

    row = (i * problem.queries + jnp.arange(problem.queries))[:, None]
    column = (j * problem.keys + jnp.arange(problem.keys))[None, :]
    if "bias" in head:
        logits += rows(block(head["bias"])).astype(logits.dtype)
    if "alibi_slopes" in head:
        slopes = head["alibi_slopes"][:, None, None]
        logits -= rows(slopes * abs(column - row)).astype(logits.dtype)
    allowed = masks.conjunction(
        block(head["mask"]) if "mask" in head else None,
        masks.may_attend(
            row,
            column,
            is_causal=problem.is_causal,
            local_window_size=problem.local_window_size,
            query_seq_length=head.get("query_seq_lengths"),
            key_value_seq_length=head.get("key_value_seq_lengths"),
            query_segment_id=masks.expand(
                ids("query_segment_ids", i, problem.queries), 1
            ),
            key_value_segment_id=masks.expand(
                ids("key_value_segment_ids", j, problem.keys), 0
            ),
        ),
    )
    if allowed is None:
        return logits
    if problem.short:
        # XLA's CPU compiler fuses an addition with the product, but not a select. Add
        # -inf: with `masks.EMPTY`, a logit of 3e38 would stay above the others.
        return logits + rows(jnp.where(allowed, 0, -jnp.inf).astype(logits.dtype))
    return jnp.where(rows(allowed), logits, masks.EMPTY)


def _rows(problem, head, name, i):
    """Take block i of a per-query array, with the group's heads concatenated."""
    x = _slice(head[name], 1, i, problem.queries)
    return x.reshape(-1, *x.shape[2:])


def _grouped(problem, arrays):
    """Reshape rows in the layout of `_rows` to G, queries, ..."""
    return tuple(x.reshape(-1, problem.queries, *x.shape[1:]) for x in arrays)


def _exponentials(logits, maximum):
    return jnp.exp(logits - maximum[:, None])


def _reciprocal(total):
    """Return 1 / total, or 0 for a query that may attend to nothing."""
    seen = total != 0
    return jnp.where(seen, 1 / jnp.where(seen, total, 1), 0)


def _visit(problem, head, step, state):
    """Run `step(i, j, state)` over the blocks that are not fully masked, row by row.

    The blocks are static, except that lengths and segments can exclude more.
    """
    if "blocks" not in head:
        return step(0, 0, state)
    rows, columns = head["blocks"]
    count = len(rows)
    if not set(masks.STRUCTURE).isdisjoint(head):
        live = _of_any(_live(problem, head, rows, columns))
        order, count = jnp.argsort(~live), live.sum()
        rows, columns = rows[order], columns[order]
    return jax.lax.fori_loop(
        0, count, lambda n, state: step(rows[n], columns[n], state), state
    )


def blocks(problem, num_queries, num_keys):
    """Return the indices of blocks that causal and window masks allow, `2 count`."""
    pairs = []
    for i in range(-(-num_queries // problem.queries)):
        start, stop = masks.key_bounds(
            i * problem.queries,
            (i + 1) * problem.queries - 1,
            num_keys,
            is_causal=problem.is_causal,
            local_window_size=problem.local_window_size,
        )
        pairs += [
            (i, j) for j in range(start // problem.keys, -(-stop // problem.keys))
        ]
    return np.array(pairs, np.int32).reshape(-1, 2).T


def _live(problem, head, i, j):
    """Return whether lengths and segments allow any pair in the blocks at i and j."""
    live = jnp.ones(len(i), bool)
    if "query_seq_lengths" in head:
        live &= i * problem.queries < head["query_seq_lengths"]
    if "key_value_seq_lengths" in head:
        live &= j * problem.keys < head["key_value_seq_lengths"]
    if "query_segment_ids" in head:
        low, high = _range(head["query_segment_ids"], problem.queries)
        key_low, key_high = _range(head["key_value_segment_ids"], problem.keys)
        live &= (low[i] <= key_high[j]) & (key_low[j] <= high[i])
    return live


def _range(ids, size):
    """Return each block's smallest and largest id; an empty range for padding only."""
    ids, limits = ids.reshape(-1, size), jnp.iinfo(ids.dtype)
    low = jnp.where(ids == 0, limits.max, ids).min(1)
    return low, jnp.where(ids == 0, limits.min, ids).max(1)


@jax.custom_batching.custom_vmap
def _of_any(live):
    """Reduce `live` with any() over a batch, so that its rows share the loop's indices.

    If each row had its own indices, it would gather its blocks and scatter its sums.
    """
    return live


@_of_any.def_vmap
def _of_any_row(size, in_batched, live):
    return _of_any(live.any(0)), False


def _varying(head, sums):
    """Cast zeros to vary over the same devices as the head, for `jax.shard_map`.

    A loop's initial carry must have the type of its result.
    """
    axes = jax.typeof(head["query"]).manual_axis_type.varying
    return jax.lax.pcast(sums, tuple(axes), to="varying")


def _slice(x, axis, index, size):
    """Take block `index` along an axis, unless the axis is one block or broadcast."""
    if x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add(total, block, indices, problem):
    """Add a block to a sum, at these block indices of its last two axes."""
    starts = [jnp.int32(0)] * total.ndim  # one type, even with 64-bit Python ints
    sizes = (problem.queries, problem.keys)
    for axis, index, size in zip((-2, -1), indices, sizes, strict=True):
        if total.shape[axis] == 1:
            block = block.sum(axis, keepdims=True)
        elif index is not None:
            starts[axis] = jnp.int32(index * size)
    if total.ndim == 3 and total.shape[0] == 1:
        block = block.sum(0, keepdims=True)
    old = jax.lax.dynamic_slice(total, starts, block.shape)
    return _written(total, old + block, *starts)


def _with_rows(problem, whole, i, rows):
    """Replace block i of a per-query array by rows in the layout of `_rows`."""
    block = rows.reshape(whole.shape[0], problem.queries, *whole.shape[2:])
    start = jnp.int32(i * problem.queries)
    rest = [jnp.int32(0)] * (whole.ndim - 2)
    return _written(whole, block, jnp.int32(0), start, *rest)


@jax.custom_batching.custom_vmap
def _written(whole, block, *starts):
    """Call `jax.lax.dynamic_update_slice`, and keep it one under `jax.vmap`.

    JAX's batching rule makes it a scatter, whose bounds XLA checks in an extra pass.
    """
    if whole.shape == block.shape:
        return block
    return jax.lax.dynamic_update_slice(whole, block, starts)


@_written.def_vmap
def _written_in_all(size, in_batched, whole, block, *starts):
    whole, block = (
        x if batched else jnp.broadcast_to(x, (size, *x.shape))
        for x, batched in zip((whole, block), in_batched, strict=False)
    )
    return _written(whole, block, jnp.int32(0), *starts), True


def _dot(left, right, contract=0):
    """Multiply, contracting the right matrix's axis `contract`; sum in float32."""
    dtype = jnp.promote_types(left.dtype, jnp.float32)
    axes = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)


def _dtype(head):
    return jnp.promote_types(head["query"].dtype, jnp.float32)
