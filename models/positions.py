"""Where a token stands: added to its embedding, turned into its queries and keys, or
added to the logits of self-attention.

`model.positions` names one of `POSITIONS`. Positions count from 0 in every sentence,
also where several are packed into one row.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headcount.models.precision import lookup

SINUSOIDAL = ("sinusoidal", "sinusoidal_paper")
POSITIONS = (*SINUSOIDAL, "learned", "rotary", "relative", "alibi", "none")

BUCKETS = 32  # of relative distances, as T5
FARTHEST = 128  # tokens; all longer distances share the last bucket


def sinusoidal(
    num_positions: int, width: int, kind: str = "sinusoidal"
) -> Float[np.ndarray, "P D"]:
    """Sines in the first half of the width, cosines in the second, as Tensor2Tensor.

    Wavelengths run geometrically from 2π to 10000·2π (Vaswani et al. 2017, 3.5). The
    last one is reached as in Tensor2Tensor ("sinusoidal"); or the step is that of the
    printed formula, 10000^(2 / D), and the last one falls short of it
    ("sinusoidal_paper", as Marian).
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
    """Turn each pair (x[i], x[i + H/2]) by position · 10000^(-2i / H).

    Then the product of a query and a key depends on how far apart they stand, not on
    where (Su et al. 2021; in halves as GPT-NeoX and Llama).
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

    2^(-8 n / N) of the heads n = 1 to N, if N is a power of 2. Else, as in the authors'
    code, those of the power below it, then every second one of the power above.
    """
    below = 2 ** (num_heads.bit_length() - 1)

    def slopes(count):
        return 2.0 ** (-8.0 * np.arange(1, count + 1, dtype=np.float32) / count)

    more = slopes(2 * below)[::2]
    return np.concatenate([slopes(below), more[: num_heads - below]])


def alibi_bias(num_heads: int, distance: Int[Array, "*X"]) -> Float[Array, "N *X"]:
    """Return -slope · |distance|: in both directions alike if keys may stand later."""
    far = jnp.abs(distance).astype(jnp.float32)
    return -alibi_slopes(num_heads).reshape(-1, *[1] * far.ndim) * far


def relative_bias(
    table: Float[Array, "buckets N"], distance: Int[Array, "*X"], *, is_causal: bool
) -> Float[Array, "N *X"]:
    """What each head adds to the logit of a key that far from its query.

    Args:
        table: `BUCKETS` N, learned; one for all layers of a stack (Raffel et al. 2020).
        distance: position of the key minus position of the query, tokens.
        is_causal: no key stands after its query, so all buckets serve what is before.
    """
    return jnp.moveaxis(lookup(table, bucket(distance, is_causal=is_causal)), -1, 0)


def bucket(distance: Int[Array, "*X"], *, is_causal: bool) -> Int[Array, "*X"]:
    """The bucket of a distance: one each when near, geometrically wider farther off.

    Both directions have half of the buckets, or the past all of them (Raffel et al.
    2020, section 2.1).
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
