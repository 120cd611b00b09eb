"""Selection on dev scores: the best parameters so far, patience, ranking."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.runtime import sharding
from headcount.tasks.base import LOSS, Metric
from headcount.training.step import TrainState


def rank(value: float, loss: float, metric: Metric) -> float:
    """Return a score to compare by: higher is better, ties are broken by the loss.

    The loss has a weight so small that it only decides between scores that are equal
    up to rounding.
    """
    if not metric.higher_is_better:
        return -value if np.isfinite(value) else -np.inf
    return value - 1e-9 * (loss if loss < 1e3 else 1e3)


def ranks(rows: dict[int, dict], metric: Metric, num_trials: int) -> np.ndarray:
    """Return the `rank` of every trial, of shape R; -inf for trials without a row."""
    scores = np.full(num_trials, -np.inf)
    for trial, row in rows.items():
        scores[trial] = rank(row[metric.name], row[LOSS.name], metric)
    return scores


def initial_best(params: nnx.State, num_trials: int) -> dict:
    """Return the initial `best`: `params`, `score` (-inf) and `step` (0) per trial."""
    return {
        "params": params,
        "score": np.full(num_trials, -np.inf),
        "step": np.zeros(num_trials, np.int32),
    }


def keep_best(best: dict, params: nnx.State, step: int, scores: np.ndarray) -> dict:
    """Update the best parameters of the trials that exceed their best score.

    Args:
        best: see `initial_best`; its parameters are donated.
        params: current parameters.
        step: current step.
        scores: current scores, of shape R; higher is better.
    """
    better = scores > best["score"]
    return {
        "params": _replace(best["params"], params, better),
        "score": np.where(better, scores, best["score"]),
        "step": np.where(better, step, best["step"]).astype(np.int32),
    }


@partial(jax.jit, donate_argnames="old")
def _replace(old: nnx.State, new: nnx.State, which: jax.Array) -> nnx.State:
    def choose(old, new):
        return jnp.where(which.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return jax.tree.map(choose, old, new)


def stop_without_progress(
    state: TrainState, best: dict, before: int, step: int
) -> tuple[TrainState, np.ndarray]:
    """Freeze the trials whose best evaluation was at step `before` or earlier.

    Returns:
        The new state, and the trials that this call froze.
    """
    late = ~sharding.fetch(state.frozen) & (best["step"] <= before)
    stopped_at = jnp.where(late, step, state.stopped_at)
    return state._replace(stopped_at=stopped_at), np.flatnonzero(late)
