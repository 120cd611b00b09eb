"""Talking heads: the heads' maps are mixed before and after the softmax.

Shazeer et al. 2020 (Talking-heads attention). Every head needs every other's whole map,
so nothing here is fused and memory is O(T S): the price of the question.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from attention import masks
from attention.api import head_gated, normalise
from attention.reference import scaled_logits


def talking_heads_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    logits_mix: Float[Array, "N N"],
    weights_mix: Float[Array, "N N"],
    head_gate: ArrayLike | None = None,
    **arguments,
) -> Array:
    """Attention whose head m has the logits Σ_n logits_n · logits_mix[n, m].

    Its weights are Σ_n softmax(those)_n · weights_mix[n, m]. With two identity matrices
    this is `dot_product_attention`, whose other arguments, shapes and errors it shares.
    The bias is added and the mask applied after the first mix, so that a mixed map
    sees no more than its own.
    """
    arrays, structure, batched = normalise(query, key, value, bias, mask, **arguments)
    query, key, value, bias, mask = arrays
    weights = mixed_weights(
        query, key, bias, mask, logits_mix, weights_mix, **structure
    ).astype(value.dtype)
    B, N, T, S = weights.shape
    K, V = value.shape[2:]
    out = jnp.einsum(
        "BKGTS,BSKV->BTKGV", weights.reshape(B, K, N // K, T, S), value
    ).reshape(B, T, N, V)
    out = head_gated(out, head_gate, batched)
    return out if batched else out[0]


def talking_heads_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    logits_mix: Float[Array, "N N"],
    weights_mix: Float[Array, "N N"],
    **arguments,
) -> Array:
    """The maps that `talking_heads_attention` uses, `B N T S` in float32, for plots."""
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = arrays
    weights = mixed_weights(
        query, key, bias, mask, logits_mix, weights_mix, **structure
    )
    return weights if batched else weights[0]


def mixed_weights(
    query, key, bias, mask, logits_mix, weights_mix, *, scale, **structure
) -> Float[Array, "B N T S"]:
    """The weights after both mixes, in float32; rows that see nothing are zero."""
    logits = scaled_logits(query, key, scale)
    logits = mix(logits, logits_mix)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    allowed = masks.dense(*logits.shape[2:], mask, **structure)
    weights = mix(masked_softmax(logits, allowed), weights_mix)
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def mix(maps: Float[Array, "B N *X"], mixture: Float[Array, "N N"]) -> Array:
    """Map m is the sum over n of map n times mixture[n, m]."""
    return jnp.einsum("BN...,NM->BM...", maps, mixture.astype(maps.dtype))


def masked_softmax(logits: Array, allowed: Array | None) -> Array:
    """Over the last axis; a row that may see nothing is zero."""
    if allowed is None:
        return jax.nn.softmax(logits, axis=-1)
    weights = jax.nn.softmax(jnp.where(allowed, logits, masks.EMPTY), axis=-1)
    return jnp.where(allowed, weights, 0.0)
