"""The loss of every trial on held-out examples."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np
from flax import nnx

from headcount.models import precision
from headcount.models.trial_axis import over_trials
from headcount.runtime import sharding


@partial(jax.jit, static_argnames=("graph", "loss"))
def summed_loss(
    graph: nnx.GraphDef, loss: Callable, params, head_gates: dict, batch: dict
):
    """Return the summed loss and weight of a batch for every trial, both of shape R.

    Args:
        graph, params, head_gates: see `tasks.base.Run`.
        loss: `Task.loss`.
        batch: batch without a trial axis, which all trials share.
    """

    def one(params, head_gates):
        return loss(precision.model_of(graph, params), batch, head_gates=head_gates)

    return over_trials(one)(params, head_gates)


@partial(jax.jit, static_argnames=("graph", "loss"))
def row_losses(graph, loss: Callable, params, head_gates: dict, batch: dict):
    """Return one trial's summed loss and weight for every row of a batch."""

    def one(row):
        row = jax.tree.map(lambda x: x[None], row)
        return loss(precision.model_of(graph, params), row, head_gates=head_gates)

    return jax.vmap(one)(batch)


def heldout_loss(run, batches: Iterable[dict]) -> np.ndarray:
    """Return the mean loss of every trial over batches, of shape R."""
    sums = [
        sharding.fetch(
            summed_loss(run.graph, run.task.loss, run.params, run.head_gates, batch)
        )
        for batch in batches
    ]
    loss, weight = (np.sum(column, axis=0) for column in zip(*sums, strict=True))
    return loss / weight
