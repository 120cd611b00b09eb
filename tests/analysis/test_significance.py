"""Intervals and p-values on thousands of simulated sweeps whose truth is known."""

import numpy as np
import pytest
from scipy import stats

from headcount.analysis.significance import (
    difference,
    holm,
    seeds_needed,
    summary,
)

SWEEPS, ARMS, SEEDS = 8000, 6, 3
SEED_SPREAD, NOISE = 0.25, 0.2  # what a seed does to every arm, and to one alone
MARGIN = 0.3


def simulate(differences, seeds=SEEDS, sweeps=SWEEPS):
    """Return scores of many sweeps, `sweeps, arms, seeds`; the baseline comes first."""
    rng = np.random.default_rng(2017)
    shared = rng.normal(0, SEED_SPREAD, (sweeps, 1, seeds))
    alone = rng.normal(0, NOISE, (sweeps, len(differences), seeds))
    return 35 + np.asarray(differences, float)[:, None] + shared + alone


def coverage(low, high, truth):
    return np.mean((low <= truth) & (truth <= high))


@pytest.mark.parametrize("seeds", [2, 3, 5, 16])
def test_intervals_cover_the_truth(seeds):
    truth = np.array([0, -0.9, -0.3, 0, 0.1, 0.3])
    scores = simulate(truth, seeds)
    found = summary(scores)
    assert coverage(found.low, found.high, 35 + truth) == pytest.approx(0.95, abs=0.02)
    paired = difference(scores[:, 1:], scores[:, :1])
    assert coverage(paired.low, paired.high, truth[1:]) == pytest.approx(0.95, abs=0.02)
    np.testing.assert_allclose(paired.mean.mean(0), truth[1:], atol=0.02)


@pytest.mark.parametrize("truth", [[0] * 6, [0, 0, 0, 0, -2, 3]])
def test_the_family_wise_error_rate_is_below_5_percent(truth):
    scores = simulate(truth)
    p = difference(scores[:, 1:], scores[:, :1]).p
    same = np.equal(truth[1:], 0)
    assert np.mean((holm(p) <= 0.05)[:, same].any(1)) < 0.05
    assert np.mean((p <= 0.05)[:, same].any(1)) > 0.07  # without correction


def test_pairing_removes_what_seeds_share():
    scores = simulate([0, 0.5], seeds=5)
    paired = difference(scores[:, 1], scores[:, 0]).p
    unpaired = stats.ttest_ind(scores[:, 1], scores[:, 0], axis=-1).pvalue
    assert np.mean(paired <= 0.05) > np.mean(unpaired <= 0.05) + 0.1


def test_scores_of_unequal_numbers_of_seeds_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) and \(1,\)"):
        difference([1, 2, 3], [2])  # NumPy would broadcast


def test_seeds_needed_give_the_promised_power():
    sd = NOISE * np.sqrt(2)
    seeds = seeds_needed(sd, MARGIN)
    found = [
        np.mean(difference(scores[:, 1], scores[:, 0]).p <= 0.05)
        for scores in (simulate([0, MARGIN], seeds), simulate([0, MARGIN], seeds - 1))
    ]
    assert found[0] > 0.79 and found[1] < 0.81
    assert seeds_needed(0.01, MARGIN) == 2 and seeds_needed(0.0, MARGIN) == 2
    assert seeds_needed(float("nan"), MARGIN) is None
    assert seeds_needed(1e4, MARGIN) == np.inf


def test_seeds_needed_depend_on_the_ratio_of_spread_and_margin():
    assert seeds_needed(0.2, MARGIN) == seeds_needed(0.02, MARGIN / 10)
    assert seeds_needed(0.2, MARGIN) < seeds_needed(0.2, MARGIN / 2)


@pytest.mark.parametrize("tested", [2, 5, 9])
def test_seeds_needed_give_the_promised_power_after_correction(tested):
    """One of several arms differs by the margin: found in four sweeps of five."""
    seeds = seeds_needed(NOISE * np.sqrt(2), MARGIN, tested)
    truth = [0, MARGIN] + [0] * (tested - 1)
    for count, low, high in ((seeds, 0.79, 0.9), (seeds - 2, 0.5, 0.79)):
        scores = simulate(truth, count, sweeps=3000)
        found = holm(difference(scores[:, 1:], scores[:, :1]).p)[:, 0] <= 0.05
        assert low < found.mean() < high, (seeds, found.mean())
    few = seeds_needed(NOISE * np.sqrt(2), MARGIN)  # for an uncorrected test
    scores = simulate(truth, few, sweeps=3000)
    assert (
        np.mean(holm(difference(scores[:, 1:], scores[:, :1]).p)[:, 0] <= 0.05) < 0.75
    )


@pytest.mark.parametrize("sd", [0.0036, 0.009, 0.02])
def test_seeds_needed_is_right_where_the_difference_is_many_sd(sd):
    seeds = seeds_needed(sd, MARGIN, 20)
    rng = np.random.default_rng(3)
    for count in (2, 3):
        p = difference(rng.normal(MARGIN, sd, (4000, count)), np.zeros(count)).p
        assert (np.mean(p <= 0.05 / 20) >= 0.8) == (seeds <= count), (sd, seeds)


def test_holm_steps_down():
    p = np.array([0.04, 0.01, np.nan, 0.03])
    np.testing.assert_allclose(holm(p), [0.06, 0.03, np.nan, 0.06])
    np.testing.assert_allclose(holm(p[None])[0], holm(p))
    assert holm(np.array([0.9, 0.8])).max() == 1


def test_too_few_seeds_give_nan():
    one = difference([35.0], [34.0])
    assert one.mean == 1 and np.isnan([one.sd, one.low, one.high, one.p]).all()
    assert np.isnan(summary([35.0]).low) and summary([35.0]).mean == 35
    same = difference([2.1, 3.1, 4.1], [1.0, 2.0, 3.0])  # 1.1 each, up to rounding
    assert same.mean == pytest.approx(1.1) and np.isnan([same.p, same.low]).all()
