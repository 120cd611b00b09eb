"""Reference attention: the definition, written with einsum in float32.

Holds the whole T x S map. All other implementations are tested against this one.
"""

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int32

from headcount.attention import dropout, masks
from headcount.attention.statistics import from_weights, over_queries


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
    """Return output, log-sum-exp and statistics: see `attention.api`."""
    weights, lse, max_logit = weights_and_lse(query, key, bias, mask, **structure)
    rows = (over_queries(from_weights(weights, max_logit)),) if statistics else ()
    weights = dropped(weights, dropout_rate, dropout_keys)
    out = weighted_values(weights, value.astype(weights.dtype), Precision.HIGHEST)
    return out.astype(query.dtype), lse, *rows


def weighted_values(
    weights: Float[Array, "B N T S"], value: Float[Array, "B S K V"], precision=None
) -> Float[Array, "B T N V"]:
    """Sum the values, weighted by each head's weights."""
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
    """Apply dropout to the weights; without keys, return them unchanged."""
    if dropout_keys is None:
        return weights
    row_keys = dropout_keys.transpose(0, 2, 1)[..., None]
    column = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    kept = dropout.kept(row_keys, column, dropout_rate)
    return jnp.where(kept, weights / (1 - dropout_rate), 0)


def weights_and_lse(
    query, key, bias, mask, *, scale, alibi_slopes=None, **structure
) -> tuple[Float[Array, "B N T S"], Float[Array, "B T N"], Float[Array, "B N T"]]:
    """Compute weights, log-sum-exp and the largest logit of every query.

    Weights and largest logit are float32 (float64 for float64 inputs), log-sum-exp is
    float32. The largest logit of a query that may attend to nothing is 0.
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
    largest = jnp.where(lse == masks.EMPTY, 0, largest)
    return weights, lse.transpose(0, 2, 1).astype(jnp.float32), largest


def alibi(
    slopes: Float[Array, "N"], num_queries: int, num_keys: int
) -> Float[Array, "N T S"]:
    """Return the ALiBi bias: minus a head's slope times the distance."""
    offset = jnp.arange(num_keys) - jnp.arange(num_queries)[:, None]
    return -slopes[:, None, None] * jnp.abs(offset)


def softmax(
    logits: Float[Array, "B N T S"], allowed
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T"]]:
    """Compute the softmax over keys, and its log-sum-exp; masked rows are zero."""
    if allowed is not None:
        logits = jnp.where(allowed, logits, masks.EMPTY)
    # The result does not depend on the subtracted maximum, so it needs no gradient.
    # `initial` keeps the maximum finite in rows whose biases are all -inf.
    highest = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=masks.LOWEST))
    exponentials = jnp.exp(logits - highest)
    total = exponentials.sum(-1, keepdims=True)
    seen = total != 0  # True for NaN as well
    total = jnp.where(seen, total, 1)
    lse = jnp.where(seen, highest + jnp.log(total), masks.EMPTY)
    return exponentials / total, lse[..., 0]


def scaled_logits(query, key, scale: float) -> Float[Array, "B N T S"]:
    """Compute scaled products of queries and keys in float32 (float64 for float64)."""
    B, T, N, _ = query.shape
    S, K = key.shape[1:3]
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    # Scale queries, not logits: XLA would fuse scaling with subtracting the softmax's
    # maximum, without rounding in between. See `of_two_features`.
    query, key = of_two_features(scale * query.astype(dtype), key.astype(dtype))
    # Heads first, which gives the map its final layout: after an einsum of B T N H,
    # XLA's CPU backend would transpose it.
    H = query.shape[3]
    query = query.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    return jnp.einsum(
        "BKXH,BKHS->BKXS",
        query.reshape(B, K, N // K * T, H),
        key.transpose(0, 2, 3, 1),
        precision=Precision.HIGHEST,
    ).reshape(B, N, T, S)


def of_two_features(query, key):
    """Append a zero to queries and keys that have a single feature.

    XLA replaces a dot product over one feature by a multiplication, which it fuses with
    the subtraction of the softmax's maximum. The product is then not rounded but the
    maximum is, so the largest logit minus the maximum is a rounding error rather than
    0. For logits of 1e30, this error overflows exp.
    """
    if query.shape[-1] > 1:
        return query, key
    return tuple(jnp.concatenate([x, jnp.zeros_like(x)], -1) for x in (query, key))
