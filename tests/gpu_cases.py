"""Cases of many blocks for the GPU kernels, compared with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from headcount.attention import masks, reference
from headcount.attention.kernels import gpu
from headcount.attention.verification import NOTHING

# Largest difference from the float32 reference, relative to its largest value. bfloat16
# has 8 bits; the weights are rounded to it before they meet the values.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}

attend = functools.partial(gpu.attend, interpret=True)


def normal(seed, *shape, dtype=jnp.float32):
    # NumPy's: JAX would compile a program per shape as soon as this file is imported
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def packed(seed, B, size, padding=9):
    """Segments in order, of any length, and padding at the end of every other row."""
    ids = np.sort(np.random.default_rng(seed).integers(1, 4, (B, size)), 1)
    ids[::2, max(size - padding, 0) :] = 0
    return np.int32(ids)


def inputs(T, S, N=2, K=1, H=16, V=16, B=2, dtype=jnp.float32):
    return (
        normal(1, B, T, N, H, dtype=dtype),
        normal(2, B, S, K, H, dtype=dtype),
        normal(3, B, S, K, V, dtype=dtype),
    )


def run(implementation, arrays, structure):
    """Output, log-sum-exp, and the gradients by all three of a sum through both."""

    def loss(query, key, value):
        out, lse = implementation(query, key, value, None, None, **structure)
        seen = lse > 0.5 * masks.EMPTY
        total = (out.astype(jnp.float32) * normal(4, *out.shape)).sum()
        total += jnp.where(seen, lse * normal(5, *lse.shape), 0).sum()
        return total, (out, jnp.where(seen, lse, -1))

    gradients, outputs = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return *outputs, *gradients


def check(arrays, **structure):
    query = arrays[0]
    structure = {**NOTHING, "scale": query.shape[-1] ** -0.5, **structure}
    got = run(attend, arrays, structure)
    exact = tuple(x.astype(jnp.float32) for x in arrays)
    want = run(reference.attend, exact, structure)
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
    "groups": (inputs(140, 150, N=4, K=2, H=8, V=24, B=1), {"is_causal": True}),
    # the last keys are seen by a masked block of queries alone
    "causal, whole tiles": (inputs(128, 128), {"is_causal": True}),
    "causal, long keys": (inputs(70, 300), {"is_causal": True}),
    "causal window": (
        inputs(300, 300, B=1),
        {"local_window_size": (100, 5), "is_causal": True},
    ),
    "lengths": (
        inputs(150, 140, B=4),
        {
            "query_seq_lengths": np.int32([150, 30, 0, 140]),
            "key_value_seq_lengths": np.int32([100, 140, 140, 0]),
        },
    ),
    "segments": (
        inputs(200, 180),
        {
            "query_segment_ids": packed(6, 2, 200),
            "key_value_segment_ids": packed(7, 2, 180),
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
    "large scale": (inputs(40, 40), {"scale": 3.0}),
    "large products": (
        tuple(np.full((2, 40, n, 16), x, "f") for n, x in ((2, 1e4), (1, -1e4)))
        + inputs(40, 40)[2:],
        {},
    ),
}
