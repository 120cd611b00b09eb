"""One key/value head with its group of query heads, block by block: see `blockwise`.

A head is a dict of its arrays: query and out_gradient `G T H`, delta and dropout_keys
`G T`, key and value `S H`, mask and bias `G T S` with axes of 1 where they are
broadcast, lengths, segment ids `T` and `S`, alibi_slopes `G`, and what the forward pass
has kept: the exponentials `(G T) S` of a short row, the maximum `G T` of a long one. If
there is more than one block, `blocks` has the indices of those to visit. In a block the
queries of the group come one after the other: products of two matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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

    def step(i, j, rows):
        before = {name: _rows(problem, rows, name, i) for name in rows}
        maximum, total = before.pop("maximum"), before.pop("total")
        logits = _logits(problem, head, i, j)
        new = jnp.maximum(logits.max(-1), maximum)
        rescale, exponentials = jnp.exp(maximum - new), _exponentials(logits, new)
        if problem.statistics:
            # Bounded, for a product of the two largest numbers would be infinite.
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
    if "value" in head:
        sums["out"] = jnp.zeros((*zeros.shape, head["value"].shape[-1]), dtype)
    rows = sums | {"maximum": zeros + masks.LOWEST, "total": zeros}
    rows = _visit(problem, head, step, _varying(head, rows))
    maximum, total = rows.pop("maximum"), rows.pop("total")
    results = _results(maximum, total, rows)
    return (*results, _reciprocal(total), maximum) if "value" in head else results


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
    out = (sums["out"] * reciprocal[..., None],) if "out" in sums else ()
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
        # Products along the rows of both matrices are the fastest on CPU.
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


def _visit(problem, head, step, state):
    """Run `step(i, j, state)` of the blocks that a query may attend to, row by row.

    Which these are is known when compiling, unless lengths or segments rule out more.
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
    """The indices of the blocks that a causal or window mask leaves, `2 count`."""
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
    """Whether lengths and segments leave anything of the blocks at indices i and j."""
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
    """The smallest and largest segment id of every block; of padding alone, none."""
    ids, limits = ids.reshape(-1, size), jnp.iinfo(ids.dtype)
    low = jnp.where(ids == 0, limits.max, ids).min(1)
    return low, jnp.where(ids == 0, limits.min, ids).max(1)


@jax.custom_batching.custom_vmap
def _of_any(live):
    """What is True in any row of a batch: they share a loop, and so its indices.

    With indices of its own each row would gather its blocks, and scatter its sums.
    """
    return live


@_of_any.def_vmap
def _of_any_row(size, in_batched, live):
    return _of_any(live.any(0)), False


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
    old = jax.lax.dynamic_slice(total, starts, block.shape)
    return _written(total, old + block, *starts)


def _with_rows(problem, whole, i, rows):
    """Replace block i of an array of queries, whose rows lie as `_rows` gives them."""
    block = rows.reshape(whole.shape[0], problem.queries, *whole.shape[2:])
    start = jnp.int32(i * problem.queries)
    rest = [jnp.int32(0)] * (whole.ndim - 2)
    return _written(whole, block, jnp.int32(0), start, *rest)


@jax.custom_batching.custom_vmap
def _written(whole, block, *starts):
    """`jax.lax.dynamic_update_slice`, which stays one under `jax.vmap`.

    JAX's own rule makes it a scatter, of which XLA checks the bounds in another pass.
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
    """Rows times a matrix, over the matrix's axis `contract`, summed in float32."""
    dtype = jnp.promote_types(left.dtype, jnp.float32)
    axes = (((1,), (contract,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=dtype)


def _dtype(head):
    return jnp.promote_types(head["query"].dtype, jnp.float32)
