"""Talking heads: attention that mixes the heads' maps before and after the softmax.

Shazeer et al. 2020 (Talking-heads attention). Every head needs the maps of all others,
so nothing is fused and memory is O(T S).
"""

import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from headcount.attention import masks
from headcount.attention.api import check_name, head_gated
from headcount.attention.arguments import dropout_arguments, normalise
from headcount.attention.reference import (
    alibi,
    dropped,
    scaled_logits,
    softmax,
    weighted_values,
)

# A block has at least MIN_ROWS queries (32 and 128 were slower at T = 256 on a CPU). A
# map has at most MAX_BLOCKS blocks, so that programs for long sequences stay small.
MIN_ROWS, MAX_BLOCKS = 64, 8


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
    implementation: str | None = None,
    **arguments,
) -> Array:
    """Compute attention with maps that are mixed across heads.

    Head m has the logits Σ_n logits_n · logits_mix[n, m]. With P the softmax of these,
    it has the weights Σ_n P_n · weights_mix[n, m]. Both mixes are `N N`. With two
    identity matrices, this equals `dot_product_attention`, whose shapes, errors, scale,
    is_causal, lengths, window, segment ids and slopes it shares. Bias and slopes are
    added and masks applied after the first mix, so each mixed map has its own mask.
    Dropout applies to the weights after the second mix.

    A causal map is computed in blocks of queries, each without the keys after its last
    query. The implementation "reference" computes whole maps.

    Raises:
      NotImplementedError: the implementation is neither None nor "reference".
    """
    if implementation not in (None, "reference"):
        check_name(implementation)
        raise NotImplementedError(
            f"implementation {implementation!r} has no talking heads; use None, or "
            "'reference'"
        )
    dtype = jnp.asarray(query).dtype
    arrays, structure, batched = normalise(query, key, value, bias, mask, **arguments)
    query, key, value, bias, mask = arrays
    scale = structure.pop("scale")
    drop = dropout_arguments(dropout_rate, dropout_seed, query)
    check_mixes(logits_mix, weights_mix, query)
    bias, allowed = bias_and_mask(query, key, bias, mask, **structure)
    out = []
    in_blocks = structure["is_causal"] and implementation != "reference"
    for rows, columns in blocks(query.shape[1], key.shape[1], in_blocks):
        weights = mixed_weights(
            query[:, rows],
            key[:, columns],
            part(bias, rows, columns),
            part(allowed, rows, columns),
            logits_mix,
            weights_mix,
            scale,
        )
        if drop["dropout_rate"]:
            row_keys = drop["dropout_keys"][:, rows]
            weights = dropped(weights, drop["dropout_rate"], row_keys)
        weights = weights.astype(value.dtype)
        out.append(weighted_values(weights, value[:, columns]))
    out = head_gated(jnp.concatenate(out, 1), head_gate, batched).astype(dtype)
    return out if batched else out[0]


def blocks(
    num_queries: int, num_keys: int, in_blocks: bool
) -> Iterator[tuple[slice, slice]]:
    """Yield blocks of queries, each with the keys up to its last query's."""
    if not in_blocks or not num_queries:
        yield slice(num_queries), slice(num_keys)
        return
    rows = max(MIN_ROWS, -(-num_queries // MAX_BLOCKS))
    for start in range(0, num_queries, rows):
        yield slice(start, start + rows), slice(start + rows)


def part(maps, rows: slice, columns: slice):
    """Cut a block out of maps `... T S`, whose last axes may be 1; None stays None."""
    if maps is None:
        return None
    T, S = maps.shape[-2:]
    everything = slice(None)
    return maps[..., rows if T > 1 else everything, columns if S > 1 else everything]


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
    """Compute the maps of `talking_heads_attention`, `B N T S` in float32."""
    arrays, structure, batched = normalise(query, key, key, bias, mask, **arguments)
    query, key, _, bias, mask = arrays
    scale = structure.pop("scale")
    check_mixes(logits_mix, weights_mix, query)
    bias, allowed = bias_and_mask(query, key, bias, mask, **structure)
    weights = mixed_weights(query, key, bias, allowed, logits_mix, weights_mix, scale)
    return weights if batched else weights[0]


def check_mixes(logits_mix, weights_mix, query) -> None:
    """Check the shapes of the mixes.

    Raises:
      ValueError: a mix does not have the shape N N.
    """
    N = query.shape[2]
    for name, mixture in (("logits_mix", logits_mix), ("weights_mix", weights_mix)):
        if np.shape(mixture) != (N, N):
            raise ValueError(
                f"{name} must have the shape N N = {(N, N)}, got {np.shape(mixture)}"
            )


def bias_and_mask(query, key, bias, mask, *, alibi_slopes=None, **structure):
    """Return the bias with ALiBi's, and all masks as one; None where there is none."""
    T, S = query.shape[1], key.shape[1]
    if alibi_slopes is not None:
        distance = alibi(alibi_slopes, T, S)
        bias = distance if bias is None else bias + distance
    return bias, masks.dense(T, S, mask, **structure)


def mixed_weights(
    query, key, bias, allowed, logits_mix, weights_mix, scale
) -> Float[Array, "B N T S"]:
    """Compute the weights after both mixes, in float32; masked rows are zero."""
    logits = mix(scaled_logits(query, key, scale), logits_mix)
    if bias is not None:
        logits = logits + bias.astype(logits.dtype)
    weights = mix(softmax(logits, allowed)[0], weights_mix)
    # where masks differ by head, the mix adds other heads' weights to masked pairs
    return weights if allowed is None else jnp.where(allowed, weights, 0.0)


def mix(maps: Float[Array, "B N *X"], mixture: ArrayLike) -> Array:
    """Mix maps: map m becomes the sum over n of map n times mixture[n, m]."""
    mixture = jnp.asarray(mixture, maps.dtype)
    B, N, *rest = maps.shape
    # One matrix product per example, which needs no transpose. XLA's CPU backend would
    # transpose all maps to contract the second of four axes.
    per_example = jnp.broadcast_to(mixture.T, (B, *mixture.T.shape))
    # by default, a TPU would round float32 logits to bfloat16
    maps = maps.reshape(B, N, math.prod(rest))  # not -1, for an empty batch
    mixed = jnp.matmul(per_example, maps, precision=jax.lax.Precision.HIGHEST)
    return mixed.reshape(B, mixture.shape[1], *rest)
