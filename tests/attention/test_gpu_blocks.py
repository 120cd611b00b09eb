"""Which blocks of the map a GPU kernel visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.attention import masks
from headcount.attention.kernels.gpu_blocks import TILES, Tiles, choose_tiles, visits
from headcount.attention.verification import NOTHING
from tests.gpu_cases import packed


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.integers(1, 90),
    st.integers(1, 90),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([16, 32]),
    st.booleans(),
    st.none() | st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_visits_are_exact(T, S, queries, keys, causal, window, cut, pack, seed):
    """Against the map itself: nothing allowed is left out, nothing else is visited."""
    rng = np.random.default_rng(seed)
    structure = dict(NOTHING, is_causal=causal, local_window_size=window)
    if cut:
        structure["query_seq_lengths"] = jnp.int32(rng.integers(0, T + 1, 2))
        structure["key_value_seq_lengths"] = jnp.int32(rng.integers(0, S + 1, 2))
    if pack:
        query_ids, key_ids = packed(seed, 2, T), packed(seed + 1, 2, S)
        structure["query_segment_ids"] = query_ids
        structure["key_value_segment_ids"] = key_ids
    static = {name: x for name, x in structure.items() if not isinstance(x, jax.Array)}
    ends = {}  # of the loops over whole blocks: no arrays

    @jax.jit
    def compiled(arrays):
        both = static | arrays
        found = []
        for by_key in (False, True):
            bounds, *ends[by_key] = visits(
                T, S, Tiles(queries, keys, 1), by_key=by_key, **both
            )
            found.append(bounds)
        return masks.dense(T, S, **both), found

    dense, found = compiled(
        {name: x for name, x in structure.items() if name not in static}
    )
    dense = np.broadcast_to(True if dense is None else dense, (2, 1, T, S))[:, 0]
    if pack:
        query_ids, key_ids = np.asarray(query_ids), np.asarray(key_ids)
    for by_key, bounds in enumerate(found):
        head, tail = ends[by_key]
        bounds = np.broadcast_to(bounds, (2, *bounds.shape[1:]))
        for b, i in np.ndindex(bounds.shape[:2]):
            start, whole_start, whole_stop, stop = bounds[b, i]
            assert start <= whole_start <= whole_stop <= max(stop, start)
            assert head or start == whole_start
            assert tail or whole_stop == max(stop, start)
            block = dense[b].T if by_key else dense[b]
            outer, inner = (keys, queries) if by_key else (queries, keys)
            block = block[i * outer : (i + 1) * outer]
            parts = [block[:, j : j + inner] for j in range(0, block.shape[1], inner)]
            some = [j for j, part in enumerate(parts) if part.any()]
            assert all(parts[j].all() for j in range(whole_start, whole_stop))
            assert all(
                parts[j].shape[1] == inner for j in range(whole_start, whole_stop)
            )
            assert all(start <= j < stop for j in some)
            # One kind of mask at a time is followed exactly, segments if both rows have
            # the same ones; more kinds may leave a block that each alone allows.
            same = not pack or set(query_ids[b]) == set(key_ids[b])
            if causal + (window is not None) + pack <= 1 and not cut and same:
                visited = list(range(start, stop))
                assert visited == (list(range(some[0], some[-1] + 1)) if some else [])


def test_tiles_fit_the_sequences():
    """At least one warpgroup's rows, and no second one without any."""
    for kernel in TILES:
        for size in (8, 64, 65, 128):
            outer = "keys" if kernel == "key_value_gradient" else "queries"
            for length, rows in ((1, 64), (64, 64), (65, 128), (999, 128)):
                tiles = choose_tiles(kernel, size, length, length)
                assert getattr(tiles, outer) == rows
