"""The GPU kernels, interpreted on the CPU, against the reference.

The interpreter fills what lies beyond an array with NaN, so a block that is not masked
at an edge shows. These are cases of many blocks. How the kernels compile for a GPU is
tested in tests/compilers/test_gpu.py, how they run on one, with every feature, in
tests/gpu/.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.attention import masks, pallas_gpu, pallas_gpu_blocks, reference
from headcount.attention.pallas_gpu_blocks import Tiles, visits
from tests.programs import equations, shapes

# Largest difference to the float32 reference, relative to its largest value. bfloat16
# has 8 bits; the weights are rounded to it before they meet the values.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}

NOTHING = {
    "is_causal": False,
    "local_window_size": None,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
    "query_segment_ids": None,
    "key_value_segment_ids": None,
}
attend = functools.partial(pallas_gpu.attend, interpret=True)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    """The interpreter's programs are long and run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def allowed(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).random(shape) < 0.5)


def packed(seed, B, size, padding=9):
    """Segments in order, of any length, and padding at the end of every other row."""
    ids = np.sort(np.random.default_rng(seed).integers(1, 4, (B, size)), 1)
    ids[::2, max(size - padding, 0) :] = 0
    return jnp.int32(ids)


def inputs(T, S, N=2, K=1, H=16, V=16, B=2, dtype=jnp.float32):
    return (
        normal(1, B, T, N, H, dtype=dtype),
        normal(2, B, S, K, H, dtype=dtype),
        normal(3, B, S, K, V, dtype=dtype),
    )


def run(implementation, arrays, bias, mask, structure):
    """Output, log-sum-exp, and the gradients by all three of a sum through both."""

    def loss(query, key, value):
        out, lse = implementation(query, key, value, bias, mask, **structure)
        seen = lse > 0.5 * masks.EMPTY
        total = (out.astype(jnp.float32) * normal(4, *out.shape)).sum()
        total += jnp.where(seen, lse * normal(5, *lse.shape), 0).sum()
        return total, (out, jnp.where(seen, lse, -1))

    gradients, outputs = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return *outputs, *gradients


def check(arrays, bias=None, mask=None, **structure):
    query = arrays[0]
    structure = {**NOTHING, "scale": query.shape[-1] ** -0.5, **structure}
    got = run(attend, arrays, bias, mask, structure)
    exact = tuple(x.astype(jnp.float32) for x in arrays)
    want = run(reference.attend, exact, bias, mask, structure)
    tolerance = TOLERANCE[query.dtype.type]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert x.dtype == (jnp.float32 if name == "lse" else query.dtype)
        scale = max(1, np.abs(y).max())
        difference = np.abs(np.float32(x) - y).max() / scale
        assert difference <= tolerance, (name, difference)  # also when it is NaN
    return got


CASES = {
    "plain": (inputs(150, 140), {}),
    "one query": (inputs(1, 140), {}),
    "groups": (inputs(140, 150, N=6, K=2, H=8, V=24), {"is_causal": True}),
    # the last keys are seen by a masked block of queries alone
    "causal, whole tiles": (inputs(128, 128), {"is_causal": True}),
    "causal, long keys": (inputs(70, 300), {"is_causal": True}),
    "causal window": (
        inputs(300, 300),
        {"local_window_size": (100, 5), "is_causal": True},
    ),
    "lengths": (
        inputs(300, 280, B=4),
        {
            "query_seq_lengths": jnp.int32([300, 130, 0, 200]),
            "key_value_seq_lengths": jnp.int32([100, 280, 280, 0]),
        },
    ),
    "segments": (
        inputs(300, 280),
        {
            "query_segment_ids": packed(6, 2, 300),
            "key_value_segment_ids": packed(7, 2, 280),
        },
    ),
    "causal segments": (
        inputs(300, 300, K=2),
        {
            "query_segment_ids": packed(6, 2, 300),
            "key_value_segment_ids": packed(6, 2, 300),
            "is_causal": True,
        },
    ),
    "segments in no order": (
        inputs(150, 160),
        {
            "query_segment_ids": packed(6, 2, 150)[:, ::-1] % 3,
            "key_value_segment_ids": packed(8, 2, 160)[:, ::-1] % 3,
        },
    ),
    "full mask": (inputs(150, 140, N=4, K=2), {"mask": allowed(9, 2, 4, 150, 140)}),
    "mask of queries and heads": (
        inputs(150, 140, N=4, K=2),
        {"mask": allowed(9, 1, 4, 150, 1), "is_causal": True},
    ),
    "mask that allows nothing": (
        inputs(40, 40),
        {"mask": jnp.zeros((1, 1, 1, 1), bool)},
    ),
    "bias": (inputs(150, 140, N=4, K=2), {"bias": normal(10, 2, 4, 150, 140)}),
    "bias of heads and keys": (
        inputs(150, 140, N=4, K=2),
        {"bias": normal(10, 1, 4, 1, 140, dtype=jnp.bfloat16), "is_causal": True},
    ),
    "bias of minus infinity": (
        inputs(40, 40),
        {"bias": jnp.where(jnp.arange(40)[:, None] < 7, -jnp.inf, 1.0)[None, None]},
    ),
    "large scale": (inputs(40, 40), {"scale": 3.0}),
    # In the rounding of their log-sum-exp log(40) is lost.
    "large bias": (
        inputs(40, 40),
        {"bias": jnp.where(jnp.arange(40)[:, None] < 7, -1e9, 1.0)[None, None]},
    ),
    "large products": (
        tuple(jnp.full((2, 40, n, 16), x) for n, x in ((2, 1e4), (1, -1e4)))
        + inputs(40, 40)[2:],
        {},
    ),
}


@functools.cache
def checked(case):
    arrays, options = CASES[case]
    return check(arrays, **options)


@pytest.mark.parametrize("case", CASES)
def test_output_lse_and_gradients(case):
    checked(case)


@pytest.mark.parametrize(
    "case", ["groups", "causal window", "segments", "bias of heads and keys"]
)
def test_statistics(case):
    """Beside the output, in one kernel, and alone."""
    (query, key, value), options = CASES[case]
    options = {**NOTHING, "scale": query.shape[-1] ** -0.5, **options}
    maps = options.pop("bias", None), options.pop("mask", None)

    @jax.jit
    def alone(query, key):
        return pallas_gpu.head_statistics(query, key, *maps, interpret=True, **options)

    @functools.partial(jax.jit, static_argnums=0)
    def beside(attend, query, key, value):
        return attend(query, key, value, *maps, statistics=True, **options)

    *got, rows = beside(attend, query, key, value)
    *want, want_rows = beside(reference.attend, query, key, value)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for found in (rows, alone(query, key)):
        for name, x, y in zip(rows._fields, found, want_rows, strict=True):
            # Distances count up to hundreds of tokens.
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)


def test_x64_mode():
    with jax.enable_x64(True):
        ids = jnp.ones((2, 40), jnp.int32)
        segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        check(inputs(40, 40, N=4, K=2), is_causal=True, **segments)


@pytest.mark.parametrize(
    "H, V, dtype",
    [
        (8, 8, jnp.bfloat16),
        (32, 16, jnp.float32),
        (48, 96, jnp.bfloat16),
        (128, 48, jnp.bfloat16),
        (192, 256, jnp.float32),
    ],
)
def test_head_sizes(H, V, dtype):
    check(inputs(70, 50, H=H, V=V, dtype=dtype), is_causal=True)


def test_rows_that_see_nothing_are_zero():
    out, _, query_gradient, key_gradient, value_gradient = checked("lengths")
    for batch, first in ((1, 130), (2, 0), (3, 0)):
        assert not out[batch, first:].any()
        assert not query_gradient[batch, first:].any()
    assert not key_gradient[0, 100:].any() and not value_gradient[0, 100:].any()


@settings(max_examples=20, deadline=None)
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
                T, S, Tiles(queries, keys, 4, 1), by_key=by_key, **both
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


def test_masked_out_keys_are_never_read():
    """NaN in the keys of blocks that causal masking rules out reaches nothing."""
    query, key, value = inputs(256, 512)
    key, value = (x.at[:, 256:].set(jnp.nan) for x in (key, value))
    structure = dict(NOTHING, is_causal=True, scale=0.25)
    got = run(attend, (query, key, value), None, None, structure)
    want = run(attend, (query, key[:, :256], value[:, :256]), None, None, structure)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x[:, :256], y)


def test_program_is_the_kernels_and_holds_no_map():
    arrays = inputs(1024, 1024)
    segments = packed(1, 2, 1024)
    structure = dict(NOTHING, is_causal=True, scale=0.25)
    structure |= {"query_segment_ids": segments, "key_value_segment_ids": segments}

    def loss(*arrays):
        out, lse = attend(*arrays, None, None, **structure)
        return out.sum() + lse.sum()

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*arrays).jaxpr
    kernels = [e for e in equations(jaxpr) if e.primitive.name == "pallas_call"]
    names = sorted(kernel.params["name"] for kernel in kernels)
    assert names == ["forward", "key_value_gradient", "query_gradient"]
    assert max(np.prod(shape) for shape in shapes(jaxpr)) < 1024 * 1024 / 8


def test_no_offset_is_beyond_its_bits():
    """Pallas counts elements with 32 bits up to 2**32 bytes; a mask's are bytes."""
    size = 46368  # its square is just above 2**31
    array = jax.ShapeDtypeStruct((1, size, 1, 16), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((1, 1, size, size), jnp.bool_)

    def out(mask, *arrays):
        return attend(*arrays, None, mask, **NOTHING, scale=0.25)[0]

    jaxpr = jax.make_jaxpr(out)(mask, array, array, array).jaxpr
    (kernel,) = (e for e in equations(jaxpr) if e.primitive.name == "pallas_call")
    itemsize = {x.aval.size: x.aval.dtype.itemsize for x in kernel.invars}
    assert itemsize[size**2] * size**2 > 2**32


def test_the_trial_axis_and_checkpoint():
    query, key, value = (jnp.stack([x, 2 * x]) for x in inputs(70, 50))
    mask = allowed(9, 1, 1, 70, 50)
    structure = dict(NOTHING, scale=0.25)

    def gradients(implementation):
        def loss(*arrays):
            return (implementation(*arrays, None, mask, **structure)[0] ** 2).sum()

        one = jax.grad(jax.checkpoint(loss), (0, 1, 2))
        # The keys are the same for all trials, the rest is each trial's own.
        return jax.jit(jax.vmap(one, (0, None, 0)))(query, key[0], value)

    for x, y in zip(gradients(attend), gradients(reference.attend), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_bits_are_the_same_every_time():
    arrays, options = CASES["groups"]
    structure = dict(NOTHING, scale=0.3, **options)
    first, second = (run(attend, arrays, None, None, structure) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_tiles_fit_the_sequences():
    for kernel in pallas_gpu_blocks.TILES:
        for head_dim in range(1, 257):
            for dtype in (jnp.float32, jnp.bfloat16):
                tiles = pallas_gpu_blocks.choose_tiles(kernel, head_dim, dtype, 20, 1)
                assert (tiles.queries, tiles.keys) in ((32, 16), (16, 16))


def test_refusals():
    arrays = inputs(20, 20)
    bias = jnp.zeros((1, 1, 1, 20))
    structure = dict(NOTHING, scale=0.25)

    def loss(*arrays):
        return attend(*arrays, None, None, **structure)[0].sum()

    with pytest.raises(NotImplementedError, match="no gradient by the bias; use 'bl"):
        jax.grad(lambda bias: attend(*arrays, bias, None, **structure)[0].sum())(bias)
    with pytest.raises(NotImplementedError, match="a first derivative only"):
        jax.grad(lambda q: jax.grad(loss)(q, *arrays[1:]).sum())(arrays[0])
    with pytest.raises(NotImplementedError, match="not int8"):
        attend(*(x.astype(jnp.int8) for x in arrays), None, None, **structure)
    with pytest.raises(NotImplementedError, match="size 256 at most, got 257 for val"):
        attend(*inputs(20, 20, V=257), None, None, **structure)
