"""What heads attend to: the numbers of `attention.head_statistics` and their mean.

Every implementation returns `HeadStatistics` of each row (`B T N`, float32, zero where
the query sees nothing); the mean over queries is taken here, once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float


class HeadStatistics(NamedTuple):
    """Per head, `B N` (the mean over its real queries) or `B T N` (of every query)."""

    entropy: Float[Array, "*shape"]  # of the weights, nats
    confidence: Float[Array, "*shape"]  # the largest weight
    distance: Float[Array, "*shape"]  # expected |i - j|, tokens
    previous: Float[Array, "*shape"]  # the share of weight at j = i - 1
    current: Float[Array, "*shape"]  # at j = i
    following: Float[Array, "*shape"]  # at j = i + 1


def from_weights(weights: Float[Array, "B N T S"]) -> HeadStatistics:
    """The statistics of every row of a full map: the specification."""
    T, S = weights.shape[2:]
    offset = jnp.arange(S) - jnp.arange(T)[:, None]
    rows = HeadStatistics(
        entropy=-xlogy(weights, weights).sum(-1),
        confidence=weights.max(-1),
        distance=(weights * jnp.abs(offset)).sum(-1),
        previous=(weights * (offset == -1)).sum(-1),
        current=(weights * (offset == 0)).sum(-1),
        following=(weights * (offset == 1)).sum(-1),
    )
    return HeadStatistics(*(jnp.float32(row).transpose(0, 2, 1) for row in rows))


def mean_over_queries(rows: HeadStatistics) -> HeadStatistics:
    """The mean over real queries, `B N`, of rows `B T N`; zero where there are none.

    A query is real if it may attend to something: then some weight is the largest.
    """
    real = rows.confidence > 0
    count = jnp.maximum(real.sum(1), 1)
    return HeadStatistics(*(jnp.where(real, row, 0).sum(1) / count for row in rows))
