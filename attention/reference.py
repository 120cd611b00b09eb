"""Attention as its definition reads: einsum in float32. The specification of the rest.

Holds the whole T x S map; every other implementation is tested against this one.
"""

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float

from headcount.attention import masks
from headcount.attention.statistics import from_weights


def attend(query, key, value, bias, mask, *, scale, statistics=False, **structure):
    """Output `B T N V` and log-sum-exp `B T N`: see `attention.api`."""
    weights, lse = weights_and_lse(query, key, bias, mask, scale=scale, **structure)
    B, N, T, S = weights.shape
    K = value.shape[2]
    out = jnp.einsum(
        "BKGTS,BSKV->BTKGV",
        weights.reshape(B, K, N // K, T, S),
        value.astype(weights.dtype),
        precision=Precision.HIGHEST,
    )
    out = out.reshape(B, T, N, value.shape[-1]).astype(query.dtype)
    return (out, lse, from_weights(weights)) if statistics else (out, lse)


def head_statistics(query, key, bias, mask, *, scale, **structure):
    """Statistics of every row: see `attention.api`."""
    weights, _ = weights_and_lse(query, key, bias, mask, scale=scale, **structure)
    return from_weights(weights)


def weights_and_lse(
    query, key, bias, mask, *, scale, **structure
) -> tuple[Float[Array, "B N T S"], Float[Array, "B T N"]]:
    """The softmax's weights and its log-sum-exp, in float32 (float64 for float64)."""
    logits = scaled_logits(query, key, scale)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    allowed = masks.dense(*logits.shape[2:], mask, **structure)
    weights, lse = softmax(logits, allowed)
    return weights, lse.transpose(0, 2, 1).astype(jnp.float32)


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
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    return scale * jnp.einsum(
        "BTKGH,BSKH->BKGTS",
        query.reshape(B, T, K, N // K, H).astype(dtype),
        key.astype(dtype),
        precision=Precision.HIGHEST,
    ).reshape(B, N, T, S)
