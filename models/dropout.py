"""Dropout with a traced rate and cheap random bits."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from headcount.attention import dropout as hashing

Dropout = tuple[Float[Array, ""] | float, Key[Array, ""]]  # rate, key


def dropout(x: Array, rate_and_key: Dropout | None, index: int) -> Array:
    """Zero each element with probability rate, and scale the rest by 1 / (1 - rate).

    The rate may be traced, so that trials of one program can have different rates.

    Args:
        x: any array.
        rate_and_key: None returns x unchanged.
        index: distinguishes calls with the same key, as within a layer.
    """
    if rate_and_key is None:
        return x
    rate, key = rate_and_key
    bits = random_bits(jax.random.fold_in(key, index), x.shape)
    keep = bits >= jnp.uint32(rate * 2.0**32)
    scale = jnp.asarray(1 / (1.0 - rate), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))


def random_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """Hash each element's index to random bits that are good enough for dropout.

    The hash is cheap enough to recompute and fuses into its consumer, whereas
    `jax.random.bits` is a separate pass of 20 rounds. The key determines the start and
    stride of the hashed counter; the hash is that of `attention.dropout`.
    """
    start, stride = jax.random.key_data(key)[-2:]
    x = jax.lax.iota(jnp.uint32, math.prod(shape)) * (stride | 1) + start
    mixed = hashing.mixed(jax.lax.bitcast_convert_type(x, jnp.int32))
    return jax.lax.bitcast_convert_type(mixed, jnp.uint32).reshape(shape)


def key_of(drop: Dropout | None, index: int) -> Key[Array, ""] | None:
    """Derive a key for a part of the model that has its own dropout rate."""
    return None if drop is None else jax.random.fold_in(drop[1], index)


def fold(drop: Dropout | None, index: int) -> Dropout | None:
    """Derive dropout for a part of the model, independent of other parts."""
    return None if drop is None else (drop[0], jax.random.fold_in(drop[1], index))
