"""Attention of a few queries to a key-value cache, for decoding steps.

Plain XLA on the cache's own layout. `dot_product_attention` tiles for long sequences,
which does not help here: each sentence has one query per beam, and the cost is reading
the cache once.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from headcount.attention import masks
from headcount.attention.talking_heads import mix


def cached_attention(
    query: Float[Array, "B W N H"],
    parts: Sequence[tuple[Float[Array, "B K H _"], Float[Array, "B K _ V"]]],
    mask: Bool[Array, "B #W S"],
    bias: Float[Array, "*B N S"] | None = None,
    *,
    logits_mix: Float[Array, "N N"] | None = None,
    weights_mix: Float[Array, "N N"] | None = None,
    sink: Float[Array, "N"] | None = None,
) -> Float[Array, "B W N V"]:
    """Compute softmax attention to a cache, with the scale 1 / sqrt(H).

    The cache consists of one or several parts, keys and values each, whose S slots
    together are those of the mask and the bias. Joining the parts would copy the cache.

    Every query must be allowed at least one key. N is a multiple of K: query head n
    reads key head n // (N // K). `logits_mix` and `weights_mix` are as in
    `attention.talking_heads_attention`, both or neither; `sink` is as in
    `attention.dot_product_attention`.
    """
    B, W, N, H = query.shape
    K = parts[0][0].shape[1]
    G = N // K
    query = scaled(query, H**-0.5).reshape(B, W, K, G, H).transpose(0, 2, 1, 3, 4)
    query = query.reshape(B, K, W * G, H)
    logits = [
        jnp.einsum("BKXH,BKHS->BKXS", query, key, preferred_element_type=jnp.float32)
        for key, _ in parts
    ]
    logits = logits[0] if len(parts) == 1 else jnp.concatenate(logits, -1)
    if logits_mix is not None:
        logits = mixed(logits, logits_mix)

    def of_queries(x):  # repeat per-head values for each query of the head
        shape = (*x.shape[:-2], K, 1, G, x.shape[-1])
        x = jnp.repeat(x.reshape(shape), W, axis=-3)
        return x.reshape(*shape[:-3], W * G, shape[-1])

    if bias is not None:
        logits = logits + of_queries(bias)
    allowed = (
        mask[:, None] if mask.shape[1] == 1 else jnp.repeat(mask, G, axis=1)[:, None]
    )
    logits = jnp.where(allowed, logits, masks.EMPTY)
    weights = jax.nn.softmax(logits, axis=-1)
    if sink is not None:
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        weights *= jax.nn.sigmoid(lse - of_queries(sink[:, None]))
    if weights_mix is not None:
        weights = mixed(weights, weights_mix)
    values = [value for _, value in parts]
    ends = np.cumsum([value.shape[2] for value in values])
    weights = jnp.split(weights.astype(values[0].dtype), ends[:-1], axis=-1)
    out = sum(map(partial(jnp.einsum, "BKXS,BKSV->BKXV"), weights, values))
    return out.reshape(B, K, W, G, -1).swapaxes(1, 2).reshape(B, W, N, -1)


def scaled(x: Array, scale: float) -> Array:
    """Multiply by a scale that is not rounded to the dtype of `x`."""
    exact = jnp.promote_types(x.dtype, jnp.float32)
    return (x.astype(exact) * scale).astype(x.dtype)


def mixed(maps: Float[Array, "B K X S"], mixture: Float[Array, "N N"]) -> Array:
    """Mix maps across heads with `mix`; X is W queries times N / K heads."""
    B, K, X, S = maps.shape
    G = len(mixture) // K
    by_head = maps.reshape(B, K, X // G, G, S).swapaxes(2, 3).reshape(B, K * G, -1, S)
    out = mix(by_head, mixture).reshape(B, K, G, X // G, S)
    return out.swapaxes(2, 3).reshape(B, K, X, S)
