"""Dropout of attention weights by hashing positions, identical in all implementations.

Whether a weight is kept depends only on the seed, batch row, head, query and key, not
on blocks, devices or the order of computation. So kernels recompute the mask in the
backward pass instead of storing it, and all kernels drop exactly the same weights.

The generator is counter-based: the 32-bit finaliser "lowbias32" (Wellons 2018,
Prospecting for hash functions) over a counter. `row_keys` is computed once per query;
`kept` is all that a kernel does per weight. Both use int32, whose arithmetic wraps,
because kernels for accelerators lack uint32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

SPREAD = np.int32(np.uint32(0x9E3779B9))  # step between neighbouring keys; odd
FIRST, SECOND = np.int32(0x7FEB352D), np.int32(np.uint32(0x846CA68B))
BITS = 24  # bits of the hash that are compared with the rate


def threshold(rate: float) -> int:
    """Return how many of the 2**24 hash values mean that a weight is dropped."""
    return round(rate * 2**BITS)


def row_keys(seed: Int32[Array, ""], B: int, T: int, N: int) -> Int32[Array, "B T N"]:
    """Hash the seed with each batch row, head and query."""
    of_rows = mixed(mixed(seed) + jax.lax.iota(jnp.int32, B))
    of_heads = mixed(of_rows[:, None] + jax.lax.iota(jnp.int32, N))
    return mixed(of_heads[:, None] + jax.lax.iota(jnp.int32, T)[:, None])


def kept(row_key: Int32[Array, "..."], column, rate: float) -> Bool[Array, "..."]:
    """Return whether to keep the weight on key `column`; the arguments broadcast."""
    x = row_key ^ (column * SPREAD)
    x = (x ^ _shifted(x, 16)) * FIRST
    x = (x ^ _shifted(x, 15)) * SECOND
    return _shifted(x, 32 - BITS) >= np.int32(threshold(rate))


def mixed(x: Int32[Array, "..."]) -> Int32[Array, "..."]:
    """Hash each number."""
    x = (x ^ _shifted(x, 16)) * FIRST
    x = (x ^ _shifted(x, 15)) * SECOND
    return x ^ _shifted(x, 16)


def _shifted(x, count):
    return jax.lax.shift_right_logical(x, jnp.full_like(x, count))
