"""The loss, and other sums, of every trial over held-out examples."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import numpy as np
from flax import nnx

from headcount.models import precision
from headcount.models.trial_axis import over_trials
from headcount.runtime import sharding


@partial(jax.jit, static_argnames=("graph", "function"))
def batch_sums(
    graph: nnx.GraphDef, function: Callable, params, head_gates: dict, batch: dict
):
    """Return a function's sums over a batch for every trial, each of shape R.

    Args:
        graph, params, head_gates: see `tasks.base.Run`.
        function: `Task.loss`, or a method like it that returns other sums.
        batch: batch without a trial axis, which all trials share.
    """

    def one(params, head_gates):
        model = precision.model_of(graph, params)
        return function(model, batch, head_gates=head_gates)

    return over_trials(one)(params, head_gates)


@partial(jax.jit, static_argnames=("graph", "loss"))
def row_losses(graph, loss: Callable, params, head_gates: dict, batch: dict):
    """Return one trial's summed loss and weight for every row of a batch."""

    def one(row):
        row = jax.tree.map(lambda x: x[None], row)
        return loss(precision.model_of(graph, params), row, head_gates=head_gates)

    return jax.vmap(one)(batch)


def heldout_sums(run, function: Callable, batches: Iterable[dict]) -> list[np.ndarray]:
    """Return a function's sums over batches for every trial; see `batch_sums`."""
    sums = [
        sharding.fetch(
            batch_sums(run.graph, function, run.params, run.head_gates, batch)
        )
        for batch in batches
    ]
    return [np.sum(column, axis=0) for column in zip(*sums, strict=True)]


def heldout_loss(run, batches: Iterable[dict]) -> np.ndarray:
    """Return the mean loss of every trial over batches, of shape R."""
    loss, weight = heldout_sums(run, run.task.loss, batches)
    return loss / weight
