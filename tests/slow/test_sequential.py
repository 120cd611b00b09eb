"""Planned looks in thousands of simulated sweeps, at every number of looks.

Scores are drawn per seed and per arm, so that differences from the shared baseline
depend on each other as those of a sweep do.
"""

import functools

import numpy as np
import pytest

from headcount.analysis.sequential import (
    LEVEL,
    VERDICTS,
    Looks,
    decide,
    detectable,
)
from headcount.analysis.significance import POWER
from tests.simulated_sweeps import simulate

SWEEPS, ARMS = 20_000, 5
PLANS = {
    1: (16,),
    2: (4, 32),
    4: (4, 8, 16, 32),
    8: (4, 5, 6, 8, 10, 12, 14, 16),
}
SAMPLING_AT_HALF = 4 * (0.25 / SWEEPS) ** 0.5  # for rates near one half
SAMPLING = 4 * (LEVEL * (1 - LEVEL) / SWEEPS) ** 0.5  # four standard errors
DRAWS = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_t(3, shape) / 3**0.5,
    "skewed": lambda rng, shape: rng.exponential(1.0, shape),
    "more skewed": lambda rng, shape: rng.lognormal(0.0, 1.0, shape) / 2.16,
    "outliers": lambda rng, shape: (
        rng.standard_normal(shape) - 5 * (rng.random(shape) < 0.05)
    ),
}


@functools.lru_cache(maxsize=2)
def differences(draw, seeds):
    """Return differences from the baseline with mean 0, arms x sweeps x seeds."""
    rng = np.random.default_rng([28, seeds])
    scores = DRAWS[draw](rng, (ARMS + 1, SWEEPS, seeds))
    return scores[1:] - scores[0]


def rate_of_any(drawn, plan, *kinds):
    """Return the share of sweeps in which any arm has one of these verdicts."""
    wrong = [VERDICTS.index(kind) for kind in kinds]
    found = [np.isin(decide(arm, plan).kinds, wrong) for arm in drawn]
    return np.any(found, axis=0).mean()


@pytest.mark.parametrize("looks", PLANS)
@pytest.mark.parametrize("draw", DRAWS)
def test_false_verdicts_of_any_kind_are_at_most_5_percent(draw, looks):
    seeds = PLANS[looks]
    drawn = differences(draw, seeds[-1])
    without = Looks(seeds, None, ARMS)
    false = rate_of_any(drawn, without, "better", "worse")
    assert 0.003 < false <= LEVEL + SAMPLING
    for margin in (0.3, 1.0, 3.0):
        plan = without._replace(margin=margin)
        assert rate_of_any(drawn, plan, "better", "worse") <= false
        for sign, wrong in ((1, "worse"), (-1, "better")):
            at_margin = drawn + sign * margin
            found = rate_of_any(at_margin, plan, "equivalent", wrong)
            assert found <= LEVEL + SAMPLING


@pytest.mark.parametrize("looks", PLANS)
@pytest.mark.parametrize("draw", DRAWS)
def test_repeated_intervals_of_all_arms_cover_at_all_looks(draw, looks):
    drawn = differences(draw, PLANS[looks][-1])
    plan, covered = Looks(PLANS[looks], None, ARMS), np.ones(SWEEPS, bool)
    for arm in drawn + 2.0:
        found = decide(arm, plan)
        covered &= ((found.low <= 2.0) & (found.high >= 2.0)).all(1)
    assert covered.mean() >= 1 - LEVEL - SAMPLING


@pytest.mark.parametrize("looks", PLANS)
def test_the_power_is_as_planned_or_higher(looks):
    """Within two points for normal scores; heavy tails give more."""
    plan = Looks(PLANS[looks], None, ARMS)
    effect = detectable(plan) * 2**0.5  # the differences have a variance of 2
    for draw in DRAWS:
        drawn = differences(draw, plan.seeds[-1])
        sd = drawn.std() / 2**0.5
        found = simulate(drawn[0] + effect * sd, effect * sd, plan)
        assert found.rates["better"] >= POWER - 0.02
        if draw == "normal":
            assert found.rates["better"] == pytest.approx(POWER, abs=0.02)


def test_scores_that_are_nearly_binary_break_the_level_somewhat():
    """docs/guides/sweeps.md says so: few seeds can't show a distribution of two."""
    rng = np.random.default_rng(5)
    shape = (ARMS + 1, SWEEPS, 32)
    scores = rng.choice([-1.0, 1.0], shape) + 0.05 * rng.standard_normal(shape)
    plan = Looks(PLANS[4], None, ARMS)
    found = rate_of_any(scores[1:] - scores[0], plan, "better", "worse")
    assert LEVEL < found < 2 * LEVEL


def failing(share):
    """Return draws with mean 0, of which this share is lower by 1."""

    def draw(rng, shape):
        fails = rng.random(shape) < share
        return share - fails + 0.01 * rng.standard_normal(shape)

    return draw


@pytest.mark.parametrize(
    "arms, baseline, rates",
    [
        (failing(1 / 2), failing(1 / 2), (0.07, 0.04, 0.05)),
        (failing(1 / 2), failing(0), (0.49, 0.05, 0.10)),
        (failing(1 / 4), failing(0), (0.86, 0.41, 0.24)),
        (failing(1 / 8), failing(0), (0.99, 0.88, 0.46)),
        (
            lambda rng, shape: rng.exponential(3.0, shape) - 3.0,
            DRAWS["normal"],
            (0.17, 0.17, 0.13),
        ),
    ],
)
def test_arms_distributed_unlike_the_baseline_break_the_level(arms, baseline, rates):
    """The rates are those of the table in docs/guides/sweeps.md, to a percent."""
    rng = np.random.default_rng(6)
    drawn = arms(rng, (ARMS, SWEEPS, 16)) - baseline(rng, (1, SWEEPS, 16))
    for seeds, rate in zip(((4, 8, 16), (8, 16), (16,)), rates, strict=True):
        found = rate_of_any(drawn, Looks(seeds, None, ARMS), "better", "worse")
        assert found == pytest.approx(rate, abs=0.005 + SAMPLING_AT_HALF)
