"""Statistics of what heads attend to: see `attention.head_statistics`.

Most implementations compute `HeadStatistics` per query (`B T N`, float32, zero where
the query may attend to nothing) and reduce them with `over_queries`. The CPU kernel
returns sums over queries, which saves most of the cost.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float


class HeadStatistics(NamedTuple):
    """Statistics per head, `B N`, or per query and head, `B T N`.

    `B N` fields are means over real queries, except `max_logit`, which is a maximum.
    """

    entropy: Float[Array, "*shape"]  # of the weights, nats
    confidence: Float[Array, "*shape"]  # the largest weight
    distance: Float[Array, "*shape"]  # expected |i - j|, tokens
    previous: Float[Array, "*shape"]  # the share of weight at j = i - 1
    current: Float[Array, "*shape"]  # at j = i
    following: Float[Array, "*shape"]  # at j = i + 1
    max_logit: Float[Array, "*shape"]  # the largest logit: scaled, biased, allowed


def from_weights(
    weights: Float[Array, "B N T S"], max_logit: Float[Array, "B N T"]
) -> HeadStatistics:
    """Compute the statistics of every query from a full map, as a reference."""
    T, S = weights.shape[2:]
    offset = jnp.arange(S) - jnp.arange(T)[:, None]
    rows = HeadStatistics(
        entropy=-xlogy(weights, weights).sum(-1),
        confidence=weights.max(-1, initial=0),
        distance=(weights * jnp.abs(offset)).sum(-1),
        previous=(weights * (offset == -1)).sum(-1),
        current=(weights * (offset == 0)).sum(-1),
        following=(weights * (offset == 1)).sum(-1),
        max_logit=max_logit,
    )
    return HeadStatistics(*(jnp.float32(row).transpose(0, 2, 1) for row in rows))


def over_queries(rows: HeadStatistics) -> HeadStatistics:
    """Average statistics, `B T N`, over real queries; zero if there are none.

    A query is real if it may attend to some key, so that its confidence is not 0. The
    maximum of `max_logit` is taken instead of its mean, to monitor growing logits. All
    are NaN if the logits of a query are.
    """
    real = rows.confidence != 0
    count = jnp.maximum(real.sum(1), 1)
    means = HeadStatistics(*(jnp.where(real, row, 0).sum(1) / count for row in rows))
    largest = jnp.where(real, rows.max_logit, -jnp.inf).max(1, initial=-jnp.inf)
    largest = jnp.where(real.any(1), largest, 0)
    return means._replace(max_logit=or_nan(largest, means.confidence))


def or_nan(largest: Float[Array, "B N"], mean: Float[Array, "B N"]):
    """Return the largest logits, or NaN where a mean is; kernels' maxima omit NaN."""
    return jnp.where(jnp.isnan(mean), jnp.nan, largest)
