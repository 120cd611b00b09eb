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


class Tiles(NamedTuple):
    """How a kernel cuts the map: queries and keys of a block, and how it runs."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By kernel, bytes of a number and largest head size: the tiles. Largest blocks that
# ptxas 13.0 compiled for the H200 without spilling registers, of those tried; in
# float32 from 128 on the three products of a tf32x3 dot leave no such choice.
# To be timed on a GPU: benchmarks/attention_gpu.py --tune.
TILES = {
    "forward": {
        (2, 64): Tiles(128, 64, 4, 3),
        (2, 128): Tiles(128, 64, 8, 3),
        (2, 256): Tiles(128, 64, 8, 2),
        (4, 32): Tiles(128, 64, 8, 2),
        (4, 64): Tiles(128, 32, 8, 2),
        (4, 128): Tiles(128, 16, 8, 2),
        (4, 256): Tiles(16, 16, 4, 1),
    },
    "statistics": {
        (2, 64): Tiles(128, 64, 8, 3),
        (2, 128): Tiles(128, 64, 8, 3),
        (2, 256): Tiles(128, 64, 8, 2),
        (4, 32): Tiles(128, 64, 8, 2),
        (4, 64): Tiles(128, 32, 8, 2),
        (4, 128): Tiles(128, 16, 8, 2),
        (4, 256): Tiles(16, 16, 4, 1),
    },
    "query_gradient": {
        (2, 64): Tiles(128, 64, 4, 3),
        (2, 128): Tiles(128, 64, 8, 2),
        (2, 256): Tiles(64, 64, 8, 2),
        (4, 32): Tiles(128, 64, 8, 2),
        (4, 64): Tiles(128, 32, 8, 2),
        (4, 128): Tiles(32, 32, 8, 2),
        (4, 256): Tiles(16, 16, 8, 1),
    },
    "key_value_gradient": {
        (2, 64): Tiles(64, 128, 8, 3),
        (2, 128): Tiles(64, 128, 8, 2),
        (2, 256): Tiles(32, 64, 8, 2),
        (4, 32): Tiles(32, 64, 8, 2),
        (4, 64): Tiles(32, 64, 8, 1),
        (4, 128): Tiles(32, 32, 8, 2),
        (4, 256): Tiles(16, 16, 8, 1),
    },
}


def choose_tiles(kernel, head_dim, dtype, num_queries, num_keys) -> Tiles:
    """The tiles of a kernel for heads of that size, no larger than the sequences."""
    size = jnp.dtype(dtype).itemsize, head_dim
    tiles = next(tiles for key, tiles in TILES[kernel].items() if size <= key)
    return tiles._replace(
        queries=min(tiles.queries, padded(num_queries)),
        keys=min(tiles.keys, padded(num_keys)),
    )


class Visits(NamedTuple):
    """Bounds of the loops over a kernel's inner blocks.

    bounds: int32 `(B or 1) x outer blocks x 4`: start, whole_start, whole_stop, stop.
    head, tail: whether there can be a masked block before, or after, the whole ones.
    """

    bounds: np.ndarray | jax.Array
    head: bool
    tail: bool


def padded(size: int) -> int:
    """The power of two that holds `size`; Triton's dots need at least 16."""
    return max(16, 1 << (size - 1).bit_length())


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
