"""The one place where masks are built. True means may attend.

`may_attend` is elementwise, so the same function serves a whole T x S map and one
block inside a kernel: give it absolute indices of any shapes that broadcast. The
`*_bounds` functions tell, for a range of rows or columns, what the structured masks
leave to look at, so that loops skip the blocks that they rule out.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

# The log-sum-exp of a query that may attend to nothing, and the logit of a pair that
# may not. Finite, not -inf: the difference of two infinities would be a NaN.
EMPTY = float(-0.7 * np.finfo(np.float32).max)
# Where the maximum of a row's logits starts: whatever lies far below has the weight 0,
# exactly, so that a row of nothing else sees nothing.
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
    """Whether the query at index `row` may attend to the key at index `column`.

    Every argument but `is_causal` and `local_window_size` (static) is an integer or an
    array of them; they broadcast against each other. Returns None if nothing is
    restricted, so that a caller can leave the selection out altogether.

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
    """The logical and of the masks that are not None; None if all of them are."""
    result = None
    for mask in masks:
        if mask is not None:
            result = mask if result is None else result & mask
    return result


def key_bounds(first_row, last_row, num_keys, *, is_causal, local_window_size):
    """The range [start, stop) of columns that rows first_row..last_row may see at most.

    Inclusive rows; integers in, integers out, and traced values likewise. The range is
    empty (stop <= start) where the rows see nothing.
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
    """The range [start, stop) of rows that see any of the columns: see `key_bounds`."""
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
    """The whole T x S map of all masks together, each of its axes full size or 1.

    For plots, the reference and implementations that take nothing else. None if every
    query may attend to every key.
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
    """`jnp.expand_dims`, with None passed through."""
    return None if array is None else jnp.expand_dims(array, axes)
