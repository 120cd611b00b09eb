"""Selection on dev scores: the best parameters per trial, ties, patience."""

import jax.numpy as jnp
import numpy as np
import pytest

from headcount.tasks.base import LOSS
from headcount.tasks.translation import METRICS
from headcount.training.selection import initial_best, keep_best, rank, ranks

BLEU, EXACT_MATCH = METRICS["bleu"], METRICS["exact_match"]


def test_keep_best_is_per_trial():
    best = initial_best({"w": jnp.zeros((2, 3))}, 2)
    assert best["score"].tolist() == [-np.inf] * 2 and best["step"].tolist() == [0, 0]
    best |= {"score": np.array([1.0, 1.0]), "step": np.array([5, 5], np.int32)}
    before = best["params"]["w"]
    best = keep_best(best, {"w": jnp.ones((2, 3))}, 10, np.array([2.0, 1.0]))
    assert before.is_deleted()  # else a run holds its first parameters to its end
    np.testing.assert_array_equal(best["params"]["w"], [[1.0] * 3, [0.0] * 3])
    assert best["score"].tolist() == [2.0, 1.0] and best["step"].tolist() == [10, 5]


@pytest.mark.parametrize("metric, best", [(BLEU, 1), (LOSS, 2)])
def test_the_best_step_is_by_the_metric_that_is_asked_for(metric, best):
    kept = initial_best({"w": jnp.zeros((1, 3))}, 1)
    for step, bleu, loss in ((1, 30.0, 2.0), (2, 20.0, 1.0)):
        scores = ranks({0: {"bleu": bleu, "loss": loss}}, metric, 1)
        kept = keep_best(kept, {"w": jnp.full((1, 3), step)}, step, scores)
    assert kept["step"].tolist() == [best]
    assert (kept["params"]["w"] == best).all()


def test_equal_scores_rank_by_the_loss():
    rows = {
        trial: {"exact_match": score, "loss": loss}
        for trial, score, loss in ((0, 0.0, 3.0), (1, 0.0, 2.0), (3, 0.1, 30.0))
    }
    scores = ranks(rows, EXACT_MATCH, 4)
    assert scores[2] < scores[0] < scores[1] < scores[3]
    assert ranks(rows, LOSS, 4).tolist() == [-3.0, -2.0, -np.inf, -30.0]


@pytest.mark.parametrize("loss", [np.inf, np.nan])
def test_a_score_counts_even_if_the_loss_is_not_finite(loss):
    worse = rank(0.0, loss, EXACT_MATCH)
    assert np.isfinite(worse) and worse < rank(0.0, 3.0, EXACT_MATCH)
    assert rank(loss, loss, LOSS) == -np.inf
