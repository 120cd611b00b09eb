"""Dropout with a rate that is data and random bits that cost next to nothing."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key, UInt32

from headcount.attention import dropout as hashing

Dropout = tuple[Float[Array, ""] | float, Key[Array, ""]]  # rate, key


def dropout(x: Array, rate_and_key: Dropout | None, index: int) -> Array:
    """Zero each element with probability rate, scale the rest by 1 / (1 - rate).

    The rate is data, not part of the program, so that trials may differ in it. None
    leaves x as it is. `index` tells the places of a layer apart.
    """
    if rate_and_key is None:
        return x
    rate, key = rate_and_key
    bits = random_bits(jax.random.fold_in(key, index), x.shape)
    keep = bits >= jnp.uint32(rate * 2.0**32)
    scale = jnp.asarray(1 / (1.0 - rate), x.dtype)
    return jnp.where(keep, x * scale, jnp.zeros((), x.dtype))


def random_bits(key: Key[Array, ""], shape: tuple[int, ...]) -> UInt32[Array, "..."]:
    """A hash of each element's index: enough for dropout, cheap enough to do again.

    It fuses into what reads it, where `jax.random.bits` is a pass of 20 rounds. The
    key gives each call a stride and a start of its own; the mixing is that of
    `attention.dropout`.
    """
    start, stride = jax.random.key_data(key)[-2:]
    x = jax.lax.iota(jnp.uint32, math.prod(shape)) * (stride | 1) + start
    mixed = hashing.mixed(jax.lax.bitcast_convert_type(x, jnp.int32))
    return jax.lax.bitcast_convert_type(mixed, jnp.uint32).reshape(shape)


def key_of(drop: Dropout | None, index: int) -> Key[Array, ""] | None:
    """The key of a place in the model that has a rate of its own."""
    return None if drop is None else jax.random.fold_in(drop[1], index)


def fold(drop: Dropout | None, index: int) -> Dropout | None:
    """Dropout for a part of the model, independent of the other parts'."""
    return None if drop is None else (drop[0], jax.random.fold_in(drop[1], index))
