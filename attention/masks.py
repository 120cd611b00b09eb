"""Attention masks, for all implementations. True means may attend.

`may_attend` is elementwise, so the same function serves a whole T x S map and one block
inside a kernel: it takes absolute indices of any shapes that broadcast. For a range of
rows or columns, the `*_bounds` functions return the range of the other axis that
structured masks allow, so that loops can skip masked blocks.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

# The log-sum-exp of a query that may attend to nothing, and the logit of a masked pair.
# Finite, not -inf: the difference of two infinities would be NaN.
EMPTY = float(-0.7 * np.finfo(np.float32).max)
# Initial value of a row's running maximum. Logits far below it, such as EMPTY, get a
# weight of exactly 0, so a row with no other logits has a total weight of 0.
LOWEST = EMPTY / 2

# Arrays that mask by index: `B`, `B`, `B T` and `B S`.
STRUCTURE = (
    "query_seq_lengths",
    "key_value_seq_lengths",
    "query_segment_ids",
    "key_value_segment_ids",
)


def may_attend(
    row,
    column,
    *,
    is_causal=False,
    local_window_size=None,
    query_seq_length=None,
    key_value_seq_length=None,
    query_segment_id=None,
    key_value_segment_id=None,
):
    """Return whether the query at index `row` may attend to the key at `column`.

    `is_causal` and `local_window_size` are static. All other arguments are integers or
    arrays of integers, and broadcast against each other. Returns None if nothing is
    masked, so that callers can skip masking.

    Indices count from the start of both sequences: with T != S, causal means
    column <= row, as in `jax.nn.dot_product_attention`. Segment id 0 is padding.
    """
    conditions = []
    if is_causal:
        conditions.append(column <= row)
    if local_window_size is not None:
        left, right = local_window_size
        conditions.append(column >= row - left)
        conditions.append(column <= row + right)
    if query_seq_length is not None:
        conditions.append(row < query_seq_length)
    if key_value_seq_length is not None:
        conditions.append(column < key_value_seq_length)
    if query_segment_id is not None:
        conditions.append(query_segment_id == key_value_segment_id)
        conditions.append(query_segment_id != 0)
    return conjunction(*conditions)


def conjunction(*masks):
    """Return the logical AND of the masks that are not None; None if all are None."""
    result = None
    for mask in masks:
        if mask is not None:
            result = mask if result is None else result & mask
    return result


def key_bounds(first_row, last_row, num_keys, *, is_causal, local_window_size):
    """Return bounds [start, stop) of the columns that rows may attend to.

    The rows are `first_row` to `last_row`, inclusive. Arguments and results may be
    Python integers or traced values. If stop <= start, the range is empty.
    """
    start, stop = 0, num_keys
    if is_causal:
        stop = _minimum(stop, last_row + 1)
    if local_window_size is not None:
        left, right = local_window_size
        start = _maximum(start, first_row - left)
        stop = _minimum(stop, last_row + right + 1)
    return start, stop


def query_bounds(
    first_column, last_column, num_queries, *, is_causal, local_window_size
):
    """Return bounds [start, stop) of the rows that may attend to any of the columns.

    Counterpart of `key_bounds`.
    """
    start, stop = 0, num_queries
    if is_causal:
        start = _maximum(start, first_column)
    if local_window_size is not None:
        left, right = local_window_size
        start = _maximum(start, first_column - right)
        stop = _minimum(stop, last_column + left + 1)
    return start, stop


def _minimum(a, b):
    return jnp.minimum(a, b) if _traced(a, b) else min(a, b)


def _maximum(a, b):
    return jnp.maximum(a, b) if _traced(a, b) else max(a, b)


def _traced(*values):
    return any(isinstance(value, jax.Array) for value in values)


def dense(
    num_queries: int,
    num_keys: int,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    is_causal=False,
    local_window_size=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
) -> Bool[Array, "_B _N _T _S"] | None:
    """Combine all masks into one T x S map, whose axes are full size or 1.

    For plots, the reference, and implementations that only accept a mask array. Returns
    None if every query may attend to every key.
    """
    structured = may_attend(
        jnp.arange(num_queries)[:, None],
        jnp.arange(num_keys)[None, :],
        is_causal=is_causal,
        local_window_size=local_window_size,
        query_seq_length=expand(query_seq_lengths, 1, 2, 3),
        key_value_seq_length=expand(key_value_seq_lengths, 1, 2, 3),
        query_segment_id=expand(query_segment_ids, 1, 3),
        key_value_segment_id=expand(key_value_segment_ids, 1, 2),
    )
    if structured is not None:
        structured = jnp.expand_dims(structured, range(4 - structured.ndim))
    return conjunction(mask, structured)


def expand(array, *axes):
    """Call `jnp.expand_dims`, passing None through."""
    return None if array is None else jnp.expand_dims(array, axes)
