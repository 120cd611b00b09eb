"""Which blocks of the T x S map a GPU kernel visits, and how it cuts the map up.

A row of blocks is visited from `start` to `stop`; within, the blocks from `whole_start`
to `whole_stop` need no mask at all. The bounds are numbers of blocks, found from the
smallest and largest index and segment id of each block, so they are exact for packed
rows (segments in order, the same ones on both sides) and generous, never wrong, for any
other segments.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HEIGHT = 64  # rows of a block that one warpgroup computes


class Tiles(NamedTuple):
    """How a kernel cuts the map, and how it runs."""

    queries: int  # per block
    keys: int
    num_warps: int  # that compute
    num_stages: int  # slots of a ring


# By kernel and largest head size. The largest tiles that fit an H200's shared memory
# and (except for a few bytes) its registers; benchmarks/attention_gpu.py --tune has not
# been run on one yet.
TILES = {
    "forward": {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 128, 8, 2)},
    "statistics": {64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2)},
    "query_gradient": {64: Tiles(128, 128, 8, 3), 128: Tiles(128, 64, 8, 2)},
    "key_value_gradient": {64: Tiles(64, 128, 8, 3), 128: Tiles(64, 128, 8, 2)},
}


def choose_tiles(kernel, head_dim, num_queries, num_keys) -> Tiles:
    """Return a kernel's tiles; of one warpgroup for a short sequence.

    Inner blocks are no longer than a short sequence, which would be padded, either.
    """
    tiles = next(tiles for size, tiles in TILES[kernel].items() if head_dim <= size)
    if kernel != "key_value_gradient" and num_keys <= HEIGHT:
        tiles = tiles._replace(keys=HEIGHT)
    if kernel == "key_value_gradient" and num_keys <= HEIGHT:
        return tiles._replace(keys=HEIGHT, num_warps=4)
    if kernel != "key_value_gradient" and num_queries <= HEIGHT:
        return tiles._replace(queries=HEIGHT, num_warps=4)
    return tiles


class Visits(NamedTuple):
    """Bounds of the loops over a kernel's inner blocks.

    bounds: int32 `(B or 1) x outer blocks x 4`: start, whole_start, whole_stop, stop.
    head, tail: whether there can be a masked block before, or after, the whole ones.
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
    """For each block of queries the key blocks to visit, or the other way (`by_key`).

    An inner block that reaches beyond its sequence is never whole; an outer one may
    be, for what it computes there is never stored.
    """
    lengths = query_seq_lengths, key_value_seq_lengths
    segments = query_segment_ids, key_value_segment_ids
    # Constants where they can be: nothing is left to compute on the device then.
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
    """First index of each block, and the first beyond it."""
    start = np.arange(-(-size // tile), dtype=np.int32) * tile
    return start, np.minimum(start + tile, size)


def _segment_range(ids, tile, clip):
    """Of each block the smallest and largest segment id, and if it has no other.

    Padding (0) is no segment: a block of padding alone gets a range that is empty.
    """
    B, size = ids.shape
    # Beyond the sequence an outer block may hold anything, an inner one is padding.
    full = jnp.pad(ids, ((0, 0), (0, -size % tile)))
    if clip:
        full = jnp.where(jnp.arange(full.shape[1]) < size, full, ids[:, -1:])
    ids = full.reshape(B, -1, tile)
    limits = jnp.iinfo(ids.dtype)
    low = jnp.where(ids == 0, limits.max, ids).min(-1)
    high = jnp.where(ids == 0, limits.min, ids).max(-1)
    return low, high, (low == high) & (ids != 0).all(-1)


def _bounds(xp, some, whole, tail):
    """Start, the first run of whole blocks, stop: int32, on a new last axis.

    Without a whole block all are the tail's, or the head's where there is no tail.
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
