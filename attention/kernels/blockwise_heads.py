"""One key/value head with its group of query heads, block by block: see `blockwise`.

A head is a dict of its arrays: query and out_gradient `G T H`, delta and dropout_keys
`G T`, key and value `S H`, mask and bias `G T S` with axes of 1 where they are
broadcast, lengths, segment ids `T` and `S`, alibi_slopes `G`, and what the forward pass
has kept: the exponentials `(G T) S` of a short row, the maximum `G T` of a long one. In
a block the queries of the group come one after the other: products of two matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from headcount.attention import dropout, masks
from headcount.attention.reference import of_two_features

# Summed row by row for the statistics: their sum over total is what they are.
OFFSETS = {"previous": -1, "current": 0, "following": 1}
STATISTICS = ("energy", "distance", *OFFSETS)


class Problem(NamedTuple):
    """What is compiled for: hashable, the same for all heads."""

    scale: float
    is_causal: bool
    local_window_size: tuple[int, int] | None
    dropout_rate: float
    queries: int  # of a block; divides the padded T
    keys: int  # of a block; divides the padded S
    short: bool  # one block holds the whole row
    one_by_one: bool  # heads
    statistics: bool  # of the rows are wanted


def forward(problem, head):
    """Of one key/value head: out `G T V` if there are values, and lse `G T`.

    Then the statistics of the rows, if they are asked for; and if there are values
    1 / total and the maximum: in lse, their sum, the total may be too small to count.
    """
    dtype = _dtype(head)

    def chunk(i):
        def step(j, carry):
            maximum, total, sums = carry
            logits = _logits(problem, head, i, j)
            new = jnp.maximum(logits.max(-1), maximum)
            rescale, exponentials = jnp.exp(maximum - new), _exponentials(logits, new)
            if problem.statistics:
                # Bounded, for a product of the two largest numbers would be infinite.
                shift = jnp.maximum(maximum - new, -1e4)
                sums = sums | {"energy": sums["energy"] + shift * total}
            more = _sums(problem, head, exponentials, i, j)
            total = total * rescale + more.pop("total")
            sums = {
                name: x * rescale.reshape(-1, *(1,) * (x.ndim - 1)) + more[name]
                for name, x in sums.items()
            }
            return new, total, sums

        rows = jnp.zeros(head["query"].shape[0] * problem.queries, dtype)
        sums = dict.fromkeys(STATISTICS if problem.statistics else (), rows)
        if "value" in head:
            sums["out"] = jnp.zeros((rows.size, head["value"].shape[-1]), dtype)
        carry = _varying(head, (rows + masks.LOWEST, rows, sums))
        carry = _visit(problem, head, i, step, carry)
        maximum, total, _ = carry
        return _grouped(problem, (*_results(*carry), _reciprocal(total), maximum))

    *results, reciprocal, maximum = _over_chunks(problem, head, chunk)
    return (*results, reciprocal, maximum) if "value" in head else tuple(results)


def short(problem, head):
    """`forward` of a single block, and the exponentials that its backward reads.

    XLA's CPU compiler makes the products, exponentials and sums one kernel, if nothing
    but what they need stands between them.
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
    if "value" not in head:
        return _grouped(problem, results)
    kept = exponentials.astype(head["value"].dtype)
    return *_grouped(problem, (*results, reciprocal)), kept


def _sums(problem, head, exponentials, i, j):
    """What a block adds to each row: by name, `(G queries)` and out with an axis V."""
    sums = {}
    if problem.statistics:
        # Once for the sums below; the logits, for the entropy, are its logarithms.
        exponentials = jax.lax.optimization_barrier(exponentials)
        G = head["query"].shape[0]
        row = jnp.tile(i * problem.queries + jnp.arange(problem.queries), G)[:, None]
        column = j * problem.keys + jnp.arange(problem.keys)
        logs = jnp.log(exponentials + jnp.finfo(exponentials.dtype).tiny)
        sums["energy"] = (exponentials * logs).sum(-1)
        # As one row, which XLA's CPU compiler multiplies faster for a whole batch.
        distances = exponentials.ravel() * abs(column - row).ravel()
        sums["distance"] = distances.reshape(exponentials.shape).sum(-1)
        for name, offset in OFFSETS.items():
            sums[name] = _diagonal(problem, exponentials, offset, row, column)
    if "value" in head:
        value = _slice(head["value"], 0, j, problem.keys)
        kept = _dropped(problem, head, exponentials, i, j)
        sums["out"] = _dot(kept.astype(value.dtype), value)
    return sums | {"total": exponentials.sum(-1)}


def _results(maximum, total, sums):
    """Output, if any, log-sum-exp, and if asked for entropy, confidence, distance."""
    reciprocal = _reciprocal(total)
    log_total = jnp.log(jnp.where(total > 0, total, 1))
    lse = jnp.where(total > 0, maximum + log_total, masks.EMPTY)
    out = (sums["out"] * reciprocal[:, None],) if "out" in sums else ()
    if "energy" not in sums:
        return *out, lse
    # The energy's logits count from the maximum, as log(total) does.
    entropy = log_total - sums["energy"] * reciprocal
    means = (sums[name] * reciprocal for name in ("distance", *OFFSETS))
    max_logit = jnp.where(total > 0, maximum, 0)
    return *out, lse, entropy, reciprocal, *means, max_logit


def _dropped(problem, head, weights, i, j):
    """Weights of a block, or gradients by them, after dropout."""
    if "dropout_keys" not in head:
        return weights
    row_key = _rows(problem, head, "dropout_keys", i)[:, None]
    column = jnp.int32(j * problem.keys) + jnp.arange(problem.keys, dtype=jnp.int32)
    kept = dropout.kept(row_key, column[None], problem.dropout_rate)
    return jnp.where(kept, weights * (1 / (1 - problem.dropout_rate)), 0)


def _diagonal(problem, exponentials, offset, row, column):
    """Those at column = row + offset, `(G queries)`; 0 where there is none."""
    if not problem.short:
        place = row + offset - column[0]
        found = jnp.take_along_axis(exponentials, place, axis=1, mode="clip")
        return jnp.where((place >= 0) & (place < problem.keys), found, 0)[:, 0]
    # By a slice, of which XLA's CPU compiler makes no more than it is: among short rows
    # a gather would count.
    T, S = problem.queries, problem.keys
    first, last = max(0, -offset), min(T, S - offset)
    rows = exponentials.reshape(-1, T * S)
    if last <= first:
        return jnp.zeros(exponentials.shape[0], exponentials.dtype)
    start = first * (S + 1) + offset
    found = rows[:, start : start + (last - first - 1) * (S + 1) + 1 : S + 1]
    return jnp.pad(found, ((0, 0), (first, T - last))).ravel()


def backward(problem, head):
    """Of one key/value head: the gradients of query, key, value, and bias if any.

    Those of key and value as H S and V S. out_gradient and delta have the factor
    1 / total, which the exponentials lack.
    """
    dtype, scale = _dtype(head), problem.scale
    S = head["key"].shape[0]

    def chunk(sums, i):
        query, out_gradient, delta = (
            _rows(problem, head, name, i) for name in ("query", "out_gradient", "delta")
        )

        def step(j, carry):
            query_gradient, key_gradient, value_gradient, bias_gradient = carry
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
            if bias_gradient is not None:
                (more,) = _grouped(problem, (logits_gradient,))
                bias_gradient = _add(bias_gradient, more, (i, j), problem)
            weights = _dropped(problem, head, weights, i, j).astype(value.dtype)
            logits_gradient = logits_gradient.astype(value.dtype)
            # Products along the rows of both matrices are the fastest on CPU.
            value_more = _dot(out_gradient.T.astype(value.dtype), weights)
            key_more = _dot(query.T, logits_gradient) * scale
            query_more = _dot(logits_gradient, key) * scale
            return (
                query_gradient + query_more,
                _add(key_gradient, key_more, (None, j), problem),
                _add(value_gradient, value_more, (None, j), problem),
                bias_gradient,
            )

        carry = (_varying(head, jnp.zeros(query.shape, dtype)), *sums)
        query_gradient, *sums = _visit(problem, head, i, step, carry)
        return tuple(sums), *_grouped(problem, (query_gradient,))

    sums = tuple(
        jnp.zeros((head[name].shape[-1], S), dtype) for name in ("key", "value")
    ) + (jnp.zeros(head["bias"].shape, dtype) if "bias" in head else None,)
    sums = _varying(head, sums)
    count = head["query"].shape[1] // problem.queries
    if count == 1:
        sums, query_gradient = chunk(sums, 0)
    else:
        sums, chunks = jax.lax.scan(chunk, sums, jnp.arange(count))
        query_gradient = _join(chunks)
    key_gradient, value_gradient, bias_gradient = sums
    gradients = query_gradient, key_gradient, value_gradient
    return gradients if bias_gradient is None else (*gradients, bias_gradient)


def _logits(problem, head, i, j):
    """One block, `(G queries) keys`, with `masks.EMPTY` where none may attend."""
    query = _rows(problem, head, "query", i)
    key = _slice(head["key"], 0, j, problem.keys)
    exact = query.dtype == _dtype(head)
    # Scaling the smaller array is faster, but would round it if it is bfloat16.
    query, key = of_two_features(query * problem.scale if exact else query, key)
    logits = _dot(query, key, 1)
    logits = logits if exact else logits * problem.scale

    def block(x):
        return _slice(_slice(x, 1, i, problem.queries), 2, j, problem.keys)

    def rows(x):
        """From G, queries, keys or what broadcasts to it, without copies for G = 1."""
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
        # A selection would keep XLA's CPU compiler from making it one with the product.
        return logits + rows(jnp.where(allowed, 0, masks.EMPTY).astype(logits.dtype))
    return jnp.where(rows(allowed), logits, masks.EMPTY)


def _rows(problem, head, name, i):
    """Block i of an array of queries, their groups one after the other."""
    x = _slice(head[name], 1, i, problem.queries)
    return x.reshape(-1, *x.shape[2:])


def _grouped(problem, arrays):
    """From rows as `_rows` gives them to G, queries, ..."""
    return tuple(x.reshape(-1, problem.queries, *x.shape[1:]) for x in arrays)


def _exponentials(logits, maximum):
    return jnp.exp(logits - maximum[:, None])


def _reciprocal(total):
    """1 / total; 0 of a row that sees nothing."""
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)


def _over_chunks(problem, head, chunk):
    """`chunk(i)` of every block of queries, joined along the rows."""
    count = head["query"].shape[1] // problem.queries
    if count == 1:
        return chunk(0)
    return jax.tree.map(_join, jax.lax.map(chunk, jnp.arange(count)))


def _join(chunks):
    """From chunks, G, rows, ... to G, all rows, ..."""
    count, G, rows, *rest = chunks.shape
    return chunks.swapaxes(0, 1).reshape(G, count * rows, *rest)


def _visit(problem, head, i, step, carry):
    """Run `step` over the blocks of keys that queries of block i may attend to."""
    S = head["key"].shape[0]
    if problem.keys == S:
        return step(0, carry)
    first = i * problem.queries
    start, stop = masks.key_bounds(
        first,
        first + problem.queries - 1,
        S,
        is_causal=problem.is_causal,
        local_window_size=problem.local_window_size,
    )
    if "key_value_seq_lengths" in head:
        stop = jnp.minimum(stop, head["key_value_seq_lengths"])
    if "query_seq_lengths" in head:
        stop = jnp.where(first < head["query_seq_lengths"], stop, 0)
    if "query_segment_ids" in head:
        ids = _slice(head["query_segment_ids"], 0, i, problem.queries)
        keys = head["key_value_segment_ids"]
        lowest = jnp.where(ids != 0, ids, ids.max()).min()
        near = (keys >= lowest) & (keys <= ids.max()) & (keys != 0)
        start = jnp.maximum(start, near.argmax())
        stop = jnp.minimum(stop, jnp.where(near.any(), S - near[::-1].argmax(), 0))
    start, stop = start // problem.keys, -(-stop // problem.keys)
    return jax.lax.fori_loop(start, stop, step, carry)


def _varying(head, sums):
    """Zeros that vary over devices as the head does: `jax.shard_map` checks it.

    A loop that adds to them must begin with the type it ends with.
    """
    axes = jax.typeof(head["query"]).manual_axis_type.varying
    return jax.lax.pcast(sums, tuple(axes), to="varying")


def _slice(x, axis, index, size):
    """Block `index` along an axis; an axis of one block, or broadcast, as it is."""
    if x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _add(total, block, indices, problem):
    """Add a block to the last two axes of a sum, at these block indices."""
    starts = [jnp.int32(0)] * total.ndim  # of one type, also where Python's are int64
    sizes = (problem.queries, problem.keys)
    for axis, index, size in zip((-2, -1), indices, sizes, strict=True):
        if total.shape[axis] == 1:
            block = block.sum(axis, keepdims=True)
        elif index is not None:
            starts[axis] = jnp.int32(index * size)
    if total.ndim == 3 and total.shape[0] == 1:
        block = block.sum(0, keepdims=True)
    if total.shape == block.shape:
        return total + block
    old = jax.lax.dynamic_slice(total, starts, block.shape)
    return jax.lax.dynamic_update_slice(total, old + block, starts)


def _dot(left, right, contract=0):
    """Rows times a matrix, over the matrix's axis `contract`, summed in float32."""
    dtype = jnp.promote_types(left.dtype, jnp.float32)
    axes = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)


def _dtype(head):
    return jnp.promote_types(head["query"].dtype, jnp.float32)
