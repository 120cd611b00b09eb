"""Attention as its definition reads: einsum in float32. The specification of the rest.

Holds the whole T x S map; every other implementation is tested against this one.
"""

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int32

from headcount.attention import dropout, masks
from headcount.attention.statistics import from_weights


def attend(
    query,
    key,
    value,
    bias,
    mask,
    *,
    dropout_rate=0.0,
    dropout_keys=None,
    statistics=False,
    **structure,
):
    """Output `B T N V` and log-sum-exp `B T N`: see `attention.api`."""
    weights, lse, max_logit = weights_and_lse(query, key, bias, mask, **structure)
    rows = (from_weights(weights, max_logit),) if statistics else ()
    weights = dropped(weights, dropout_rate, dropout_keys)
    out = weighted_values(weights, value.astype(weights.dtype), Precision.HIGHEST)
    return out.astype(query.dtype), lse, *rows


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B S K V"], precision=None
) -> Float[Array, "B T N V"]:
    """Return the sum of the values that each head weighs."""
    B, N, T, S = weights.shape
    K, V = value.shape[2:]
    # heads first: see `scaled_logits`
    out = jnp.einsum(
        "BKXS,BKSV->BKXV",
        weights.reshape(B, K, N // K * T, S),
        value.transpose(0, 2, 1, 3),
        precision=precision,
    )
    return out.reshape(B, N, T, V).transpose(0, 2, 1, 3)


def dropped(
    weights: Float[Array, "B N T S"],
    dropout_rate: float,
    dropout_keys: Int32[Array, "B T N"] | None,
) -> Float[Array, "B N T S"]:
    """Weights after dropout; without keys as they are."""
    if dropout_keys is None:
        return weights
    row_keys = dropout_keys.transpose(0, 2, 1)[..., None]
    column = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    kept = dropout.kept(row_keys, column, dropout_rate)
    return jnp.where(kept, weights / (1 - dropout_rate), 0)


def head_statistics(query, key, bias, mask, **structure):
    """Statistics of every row: see `attention.api`."""
    weights, _, max_logit = weights_and_lse(query, key, bias, mask, **structure)
    return from_weights(weights, max_logit)


def weights_and_lse(
    query, key, bias, mask, *, scale, alibi_slopes=None, **structure
) -> tuple[Float[Array, "B N T S"], Float[Array, "B T N"], Float[Array, "B N T"]]:
    """The softmax's weights, its log-sum-exp, and the largest logit of every row.

    In float32 (float64 for float64). The last is 0 in a row that may see nothing.
    """
    logits = scaled_logits(query, key, scale)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if alibi_slopes is not None:
        logits = logits + alibi(alibi_slopes, *logits.shape[2:])
    allowed = masks.dense(*logits.shape[2:], mask, **structure)
    weights, lse = softmax(logits, allowed)
    seen = logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)
    largest = seen.max(-1, initial=-jnp.inf)
    largest = jnp.where(lse > masks.EMPTY, largest, 0)
    return weights, lse.transpose(0, 2, 1).astype(jnp.float32), largest


def alibi(
    slopes: Float[Array, "N"], num_queries: int, num_keys: int
) -> Float[Array, "N T S"]:
    """What is added to the logits: minus a head's slope times the distance."""
    offset = jnp.arange(num_keys) - jnp.arange(num_queries)[:, None]
    return -slopes[:, None, None] * jnp.abs(offset)


def softmax(
    logits: Float[Array, "B N T S"], allowed
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T"]]:
    """Over the keys, with its log-sum-exp; a row that may see nothing is zero."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, masks.EMPTY)
    # The maximum only shifts the exponent's range: no gradient is due through it. The
    # bound keeps rows finite whose bias is -inf all along.
    highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=masks.LOWEST))
    exponentials = jnp.exp(logits - highest)
    total = exponentials.sum(-1, keepdims=True)
    seen = total > 0
    total = jnp.where(seen, total, 1)
    lse = jnp.where(seen, highest + jnp.log(total), masks.EMPTY)
    return exponentials / total, lse[..., 0]


def scaled_logits(query, key, scale: float) -> Float[Array, "B N T S"]:
    """Products of queries and keys, in float32 (float64 for float64)."""
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    # Queries are scaled, not logits: XLA would make the scale, and the maximum that
    # the softmax subtracts, one exact operation. See `of_two_features`.
    query, key = of_two_features(scale * query.astype(dtype), key.astype(dtype))
    # Heads first, so that a map comes out as it is kept: XLA's CPU backend would
    # transpose it after an einsum of B T N H.
    H = query.shape[3]
    query = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return jnp.einsum(
        "BKXH,BKHS->BKXS",
        query.reshape(B, K, N // K * T, H),
        key.transpose(0, 2, 3, 1),
        precision=Precision.HIGHEST,
    ).reshape(B, N, T, S)


def of_two_features(query, key):
    """Append a zero to queries and keys of one feature, so that a dot product is one.

    XLA replaces those of one feature by a multiplication, which it then fuses with the
    subtraction of the softmax's maximum and does not round: the largest logit differs
    from the maximum by its rounding, which for one of 1e30 is more than exp can take.
    """
    if query.shape[-1] > 1:
        return query, key
    return tuple(jnp.concatenate([x, jnp.zeros_like(x)], -1) for x in (query, key))
