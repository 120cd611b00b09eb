"""What heads attend to: the numbers of `attention.head_statistics`, over all queries.

Every implementation returns `HeadStatistics` of each row (`B T N`, float32, zero where
the query sees nothing); they are summed up over queries here, once.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float


class HeadStatistics(NamedTuple):
    """Per head, `B N` or `B T N` (of every query).

    `B N` is the mean over the real queries, and of `max_logit` the largest.
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
    """The statistics of every row of a full map: the specification."""
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
    """The mean over real queries, `B N`, of rows `B T N`; zero where there are none.

    A query is real if it may attend to something: then some weight is the largest. Of
    the largest logits, which are there to be watched for growing, the largest.
    """
    real = rows.confidence > 0
    count = jnp.maximum(real.sum(1), 1)
    means = HeadStatistics(*(jnp.where(real, row, 0).sum(1) / count for row in rows))
    largest = jnp.where(real, rows.max_logit, -jnp.inf).max(1, initial=-jnp.inf)
    return means._replace(max_logit=jnp.where(real.any(1), largest, 0))
