"""Talking heads: the heads' maps are mixed before and after the softmax.

Shazeer et al. 2020 (Talking-heads attention). Every head needs every other's whole map,
so nothing here is fused and memory is O(T S): the price of the question.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from headcount.attention import masks
from headcount.attention.api import head_gated
from headcount.attention.arguments import dropout_arguments, normalise
from headcount.attention.reference import (
    alibi,
    dropped,
    scaled_logits,
    softmax,
    weighted_values,
)


def talking_heads_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    logits_mix: ArrayLike,
    weights_mix: ArrayLike,
    dropout_rate: float = 0.0,
    dropout_seed: int | Array | None = None,
    head_gate: ArrayLike | None = None,
    **arguments,
) -> Array:
    """Attention whose head m has the logits Σ_n logits_n · logits_mix[n, m].

    Its weights are Σ_n softmax(those)_n · weights_mix[n, m]; both mixes are `N N`. With
    two identity matrices this is `dot_product_attention`, whose shapes, errors, scale,
    is_causal, lengths, window, segment ids and slopes it shares. Bias and slopes are
    added and the mask applied after the first mix, so that a mixed map sees no more
    than its own. Dropout is on the weights after the second mix.
    """
    dtype = jnp.asarray(query).dtype
    arrays, structure, batched = normalise(query, key, value, bias, mask, **arguments)
    query, key, value, bias, mask = arrays
    weights = mixed_weights(
        query, key, bias, mask, logits_mix, weights_mix, **structure
    )
    drop = dropout_arguments(dropout_rate, dropout_seed, query)
    weights = dropped(weights, **drop).astype(value.dtype)
    out = head_gated(weighted_values(weights, value), head_gate, batched).astype(dtype)
    return out if batched else out[0]


def talking_heads_weights(
    query: ArrayLike,
    key: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    logits_mix: ArrayLike,
    weights_mix: ArrayLike,
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
    query,
    key,
    bias,
    mask,
    logits_mix,
    weights_mix,
    *,
    scale,
    alibi_slopes=None,
    **structure,
) -> Float[Array, "B N T S"]:
    """The weights after both mixes, in float32; rows that see nothing are zero.

    Raises: ValueError: a mix of another shape than N N.
    """
    N = query.shape[2]
    for name, mixture in (("logits_mix", logits_mix), ("weights_mix", weights_mix)):
        if np.shape(mixture) != (N, N):
            raise ValueError(
                f"{name} must have the shape N N = {(N, N)}, got {np.shape(mixture)}"
            )
    logits = scaled_logits(query, key, scale)
    logits = mix(logits, logits_mix)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    if alibi_slopes is not None:
        logits = logits + alibi(alibi_slopes, *logits.shape[2:])
    allowed = masks.dense(*logits.shape[2:], mask, **structure)
    weights = mix(softmax(logits, allowed)[0], weights_mix)
    # where masks differ by head, others' weights were mixed into what is masked
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def mix(maps: Float[Array, "B N *X"], mixture: ArrayLike) -> Array:
    """Map m is the sum over n of map n times mixture[n, m], `N N`."""
    mixture = jnp.asarray(mixture, maps.dtype)
    B, N, *rest = maps.shape
    # A product of matrices per example, which moves no map: contracted over the second
    # axis of four, XLA's CPU backend transposes them all.
    each = jnp.broadcast_to(mixture.T, (B, *mixture.T.shape))
    # else a TPU would round float32 logits to bfloat16 here
    maps = maps.reshape(B, N, math.prod(rest))  # not -1, for an empty batch
    mixed = jnp.matmul(each, maps, precision=jax.lax.Precision.HIGHEST)
    return mixed.reshape(B, mixture.shape[1], *rest)
