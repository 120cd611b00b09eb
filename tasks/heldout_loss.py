"""The loss, and other sums, of every trial over held-out examples; scores of texts."""

from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.data.batches import unpacked_batches
from headcount.data.examples import Ragged
from headcount.models import precision
from headcount.models.trial_axis import over_trials
from headcount.runtime import sharding

SCORING_TOKENS = 2048  # tokens per batch of texts; bounds the memory of the logits


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


@partial(jax.jit, static_argnames="graph")
def logits_of(graph, params, head_gates: dict, batch: dict):
    """Return one trial's logits of tokens, or of classes, at every position of a batch.

    They have shape B T vocab or B T C, and are in float32.
    """
    model = precision.model_of(graph, params)
    function = model if model.classifier is None else model.class_logits
    return function(batch, head_gates=head_gates).astype(jnp.float32)


@partial(jax.jit, static_argnames="graph")
def batch_log_probabilities(graph, params, head_gates: dict, batch: dict):
    """Return one trial's log-probability of each token of a batch, of shape B T."""
    logits = precision.model_of(graph, params)(batch, head_gates=head_gates)
    return jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["target"][..., None], axis=-1
    )[..., 0]


def token_log_probabilities(
    run, fields: dict[str, Ragged], trial: int
) -> list[np.ndarray]:
    """Return one trial's log-probabilities of all target tokens, by example."""
    params, gates = run.of(trial)
    by_example = [np.zeros(0)] * len(fields["target"])
    with jax.set_mesh(run.mesh):
        for indices, batch in unpacked_batches(fields, batch_tokens=SCORING_TOKENS):
            rows = batch_log_probabilities(run.graph, params, gates, batch)
            for index, row in zip(indices, np.float64(rows), strict=False):
                by_example[index] = row[: len(fields["target"][index])]
    return by_example


def heldout_sums(run, function: Callable, batches: Iterable[dict]) -> list[np.ndarray]:
    """Return a function's sums over batches for every trial; see `batch_sums`.

    Batches are summed in float64, because float32 rounds counts above 2^24 tokens.
    """
    of_run = run.graph, function, run.params, run.head_gates
    sums = [
        sharding.fetch(batch_sums(*of_run, sharding.over_data(batch)))
        for batch in batches
    ]
    columns = zip(*sums, strict=True)
    return [np.sum(column, axis=0, dtype=np.float64) for column in columns]


def loss_and_share(
    run, function: Callable, batches: Iterable[dict], trials: Iterable[int], name: str
) -> list[dict]:
    """Return the mean loss of trials, and their share of exact predictions as `name`.

    Args:
        function: like `Task.loss`, but also returns the number of exact predictions.
    """
    loss, weight, exact = heldout_sums(run, function, batches)
    return [
        {"loss": float(loss[i] / weight[i]), name: float(exact[i] / weight[i])}
        for i in trials
    ]


def heldout_loss(run, batches: Iterable[dict]) -> np.ndarray:
    """Return the mean loss of every trial over batches, of shape R."""
    loss, weight = heldout_sums(run, run.task.loss, batches)
    return loss / weight
