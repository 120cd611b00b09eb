"""Tile sizes of the GPU kernels, and the blocks of the T x S map that they visit.

A row of blocks is visited from `start` to `stop`; in this range, the blocks from
`whole_start` to `whole_stop` need no mask. The bounds are block indices, derived from
the smallest and largest index and segment id of each block. So they are exact for
packed rows (ordered segments, the same for queries and keys) and conservative for other
segments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HEIGHT = 64  # rows of a block per warpgroup


class Tiles(NamedTuple):
    """Block sizes and launch parameters of a kernel."""

    queries: int  # per block
    keys: int
    num_stages: int  # slots per ring


# By kernel and largest head size: the largest tiles that fit an H200's shared memory
# and (except for a few bytes) its registers. Not yet tuned on a GPU; to tune, run
# benchmarks/attention_gpu.py --tune.
TILES = {
    "forward": {64: Tiles(128, 128, 3), 128: Tiles(128, 128, 2)},
    "statistics": {64: Tiles(128, 64, 3), 128: Tiles(128, 64, 2)},
    "query_gradient": {64: Tiles(128, 128, 3), 128: Tiles(128, 64, 2)},
    "key_value_gradient": {64: Tiles(64, 128, 3), 128: Tiles(64, 128, 2)},
}


def choose_tiles(kernel, head_dim, num_queries, num_keys) -> Tiles:
    """Return a kernel's tiles, reduced for short sequences to avoid padding.

    A short outer sequence uses one computing warpgroup; a short inner sequence of keys
    uses shorter blocks.
    """
    tiles = next(tiles for size, tiles in TILES[kernel].items() if head_dim <= size)
    if num_keys <= HEIGHT:
        tiles = tiles._replace(keys=HEIGHT)
    if kernel != "key_value_gradient" and num_queries <= HEIGHT:
        tiles = tiles._replace(queries=HEIGHT)
    return tiles


class Visits(NamedTuple):
    """Bounds of the loops over a kernel's inner blocks.

    bounds: int32 `(B or 1) x outer blocks x 4`: start, whole_start, whole_stop, stop.
    head, tail: whether masked blocks can come before or after the whole ones.
    """

    bounds: np.ndarray | jax.Array
    head: bool
    tail: bool


def visits(
    num_queries: int,
    num_keys: int,
    tiles: Tiles,
    *,
    by_key: bool,
    is_causal,
    local_window_size,
    query_seq_lengths,
    key_value_seq_lengths,
    query_segment_ids,
    key_value_segment_ids,
) -> Visits:
    """Find which key blocks to visit per query block, or the reverse if `by_key`.

    An inner block that extends past its sequence is never whole. An outer one may be,
    because results past its sequence are not stored.
    """
    lengths = query_seq_lengths, key_value_seq_lengths
    segments = query_segment_ids, key_value_segment_ids
    # NumPy where possible, so that bounds are constants and cost nothing at run time.
    xp = np if all(x is None for x in lengths + segments) else jnp
    row, row_end = _edges(num_queries, tiles.queries)
    column, column_end = _edges(num_keys, tiles.keys)
    row, row_end = row[:, None], row_end[:, None]

    some = xp.ones((1, row.size, column.size), bool)
    complete = row + tiles.queries <= num_queries
    if not by_key:
        complete = column + tiles.keys <= num_keys
    whole = some & complete
    if is_causal:
        some &= column < row_end
        whole &= column_end <= row + 1
    if local_window_size is not None:
        left, right = local_window_size
        some &= (column_end > row - left) & (column < row_end + right)
        whole &= (column >= row_end - 1 - left) & (column_end <= row + 1 + right)
    if query_seq_lengths is not None:
        length = query_seq_lengths[:, None, None]
        some &= row < length
        whole &= row_end <= length
    if key_value_seq_lengths is not None:
        length = key_value_seq_lengths[:, None, None]
        some &= column < length
        whole &= column_end <= length
    if query_segment_ids is not None:
        low, high, pure = _segment_range(query_segment_ids, tiles.queries, not by_key)
        low, high, pure = (x[:, :, None] for x in (low, high, pure))
        key_low, key_high, key_pure = (
            x[:, None, :]
            for x in _segment_range(key_value_segment_ids, tiles.keys, by_key)
        )
        some &= (low <= key_high) & (key_low <= high)
        whole &= pure & key_pure & (low == key_low)
    if by_key:
        some, whole = some.swapaxes(1, 2), whole.swapaxes(1, 2)

    sequential = segments[0] is not None or local_window_size is not None
    unbounded = all(x is None for x in lengths) and not sequential
    inner_size, inner_tile = (
        (num_queries, tiles.queries) if by_key else (num_keys, tiles.keys)
    )
    ragged = inner_size % inner_tile != 0
    head = sequential or (is_causal and by_key)
    tail = not unbounded or ragged or (is_causal and not by_key)
    return Visits(_bounds(xp, some, whole, tail), head, tail)


def _edges(size, tile):
    """Return the start and end index of each block."""
    start = np.arange(-(-size // tile), dtype=np.int32) * tile
    return start, np.minimum(start + tile, size)


def _segment_range(ids, tile, clip):
    """Return each block's smallest and largest segment id, and if it has only one.

    Padding (0) does not count as a segment: the range of an all-padding block is empty.
    """
    B, size = ids.shape
    # Past its sequence, an inner block is padding; an outer one (`clip`) can repeat the
    # last id, and so stay whole.
    full = jnp.pad(ids, ((0, 0), (0, -size % tile)))
    if clip:
        full = jnp.where(jnp.arange(full.shape[1]) < size, full, ids[:, -1:])
    ids = full.reshape(B, -1, tile)
    limits = jnp.iinfo(ids.dtype)
    low = jnp.where(ids == 0, limits.max, ids).min(-1)
    high = jnp.where(ids == 0, limits.min, ids).max(-1)
    return low, high, (low == high) & (ids != 0).all(-1)


def _bounds(xp, some, whole, tail):
    """Return start, the bounds of the first run of whole blocks, and stop.

    The result is int32, with a new last axis. If no block is whole, all belong to the
    tail, or to the head if there is no tail.
    """
    count = some.shape[-1]
    index = xp.arange(count, dtype=np.int32)
    some, whole = xp.broadcast_arrays(some, whole)
    start = xp.where(some, index, count).min(-1)
    stop = xp.where(some, index + 1, 0).max(-1)
    start = xp.minimum(start, stop)
    whole &= some
    whole_start = xp.where(whole, index, count).min(-1)
    beyond = ~whole & (index >= whole_start[..., None])
    whole_stop = xp.where(beyond, index, count).min(-1)
    none = whole_start == count
    whole_start, whole_stop = (
        xp.where(none, start if tail else stop, bound)
        for bound in (whole_start, whole_stop)
    )
    return xp.stack([start, whole_start, whole_stop, stop], axis=-1).astype(np.int32)
