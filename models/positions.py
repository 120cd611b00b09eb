"""Encodings of token positions.

`model.positions` names one of `POSITIONS`. Encodings are added to embeddings, rotate
queries and keys, or are added to the logits of self-attention. Positions count from 0
in every sentence, even if several are packed into one row.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headcount.models.precision import lookup

SINUSOIDAL = ("sinusoidal", "sinusoidal_paper")
POSITIONS = (*SINUSOIDAL, "learned", "rotary", "relative", "alibi", "none")

BUCKETS = 32  # of relative distances, as in T5
FARTHEST = 128  # tokens; all longer distances share the last bucket


def sinusoidal(
    num_positions: int, width: int, kind: str = "sinusoidal"
) -> Float[np.ndarray, "P D"]:
    """Compute sinusoidal position encodings (Vaswani et al. 2017, section 3.5).

    Sines are in the first half of the width and cosines in the second, as in
    Tensor2Tensor. Wavelengths form a geometric progression from 2π to 10000·2π. With
    "sinusoidal", it includes 10000·2π, as in Tensor2Tensor. With "sinusoidal_paper",
    the ratio is 10000^(2 / D) as in the paper's formula and in Marian, so the last
    wavelength is smaller.
    """
    half = width // 2
    steps = half if kind == "sinusoidal_paper" else max(half - 1, 1)
    rates = 10_000.0 ** -(np.arange(half) / steps)
    angles = np.arange(num_positions)[:, None] * rates
    table = np.zeros((num_positions, width), np.float32)
    table[:, :half] = np.sin(angles)
    table[:, half : 2 * half] = np.cos(angles)
    return table


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Rotate each pair (x[i], x[i + H/2]) by the angle position · 10000^(-2i / H).

    This makes the product of a query and a key depend on their relative position only
    (Su et al. 2021). Pairs are split in halves, as in GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    rates = 10_000.0 ** -(np.arange(half, dtype=np.float32) / half)
    angles = positions[..., None, None] * rates  # B T 1 H/2
    sine, cosine = jnp.sin(angles), jnp.cos(angles)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [left * cosine - right * sine, right * cosine + left * sine], axis=-1
    ).astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """Return the slopes of attention with linear biases (ALiBi, Press et al. 2022).

    If N is a power of 2, the slopes are 2^(-8 n / N) for n = 1 to N. Otherwise, as in
    the authors' code, they are the slopes for the next lower power of 2, followed by
    every second slope for the next higher one.
    """
    below = 2 ** (num_heads.bit_length() - 1)

    def slopes(count):
        return 2.0 ** (-8.0 * np.arange(1, count + 1, dtype=np.float32) / count)

    finer = slopes(2 * below)[::2]
    return np.concatenate([slopes(below), finer[: num_heads - below]])


def alibi_bias(num_heads: int, distance: Int[Array, "*X"]) -> Float[Array, "N *X"]:
    """Return -slope · |distance|, which is symmetric for earlier and later keys."""
    far = jnp.abs(distance).astype(jnp.float32)
    return -alibi_slopes(num_heads).reshape(-1, *[1] * far.ndim) * far


def relative_bias(
    table: Float[Array, "buckets N"], distance: Int[Array, "*X"], *, is_causal: bool
) -> Float[Array, "N *X"]:
    """Look up each head's bias for relative distances (Raffel et al. 2020).

    Args:
        table: `BUCKETS` N, learned and shared by all layers of a stack.
        distance: position of the key minus position of the query, in tokens.
        is_causal: whether there are no later keys, so that earlier ones use all
            buckets.
    """
    return jnp.moveaxis(lookup(table, bucket(distance, is_causal=is_causal)), -1, 0)


def bucket(distance: Int[Array, "*X"], *, is_causal: bool) -> Int[Array, "*X"]:
    """Return the bucket of a distance (Raffel et al. 2020, section 2.1).

    Short distances have one bucket each; buckets for longer ones grow geometrically.
    Each direction uses half of the buckets; if causal, earlier keys use all of them.
    """
    num_buckets, first = BUCKETS, 0
    if not is_causal:
        num_buckets //= 2
        first = num_buckets * (distance > 0)
    size = jnp.maximum(-distance, 0) if is_causal else jnp.abs(distance)
    exact = num_buckets // 2
    growth = jnp.log(jnp.maximum(size, 1) / exact) / np.log(FARTHEST / exact)
    wide = exact + (growth * (num_buckets - exact)).astype(jnp.int32)
    return first + jnp.where(size < exact, size, jnp.minimum(wide, num_buckets - 1))
