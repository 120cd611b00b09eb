"""Curves a·n^b + c are found again, with intervals that cover them."""

import numpy as np
import pytest
from scipy.optimize import least_squares as scipy_least_squares

from headcount.analysis.significance import summary
from headcount.analysis.trends import fit_trend

VALUES = np.array([1.0, 2.0, 4.0, 8.0, 16.0])


def scores(a, b, c, sd, seeds, rng):
    """Return scores on a curve; a seed moves all arms together, and each a little."""
    shared = rng.normal(0, 5 * sd, seeds)
    return a * VALUES[:, None] ** b + c + shared + rng.normal(0, sd, (5, seeds))


@pytest.mark.parametrize("a, b, c", [(0.5, -0.5, 1.2), (-0.3, 0.26, 2), (0.01, 1, 3)])
def test_a_curve_without_noise_is_found_exactly(a, b, c):
    trend = fit_trend(VALUES, scores(a, b, c, 0, 3, np.random.default_rng(0)))
    for found, wanted in zip((trend.a, trend.b, trend.c), (a, b, c), strict=True):
        assert found == pytest.approx([wanted] * 3, abs=1e-6)
    assert trend.residual < 1e-9
    mean, low, high = trend.at(np.array([3.0]))
    assert mean == pytest.approx(a * 3**b + c) and low == pytest.approx(high)


def test_the_fit_is_at_least_as_good_as_scipys():
    drawn = scores(0.4, -0.8, 1.0, 0.02, 4, np.random.default_rng(2))
    trend, means = fit_trend(VALUES, drawn), drawn.mean(1)

    def residuals(p):
        return p[0] * VALUES ** p[1] + p[2] - means

    ours = np.sum(residuals([trend.a[0], trend.b[0], trend.c[0]]) ** 2)
    scipys = 2 * scipy_least_squares(residuals, [0.4, -0.8, 1.0]).cost
    assert ours <= scipys * 1.01
    assert trend.residual == pytest.approx(
        np.abs(residuals([trend.a[0], trend.b[0], trend.c[0]])).max()
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 12])
def test_intervals_of_the_curve_cover_the_truth(seeds):
    """Of the slope from 1 to 16, in which what a seed does to all arms cancels."""
    rng, hits, widths = np.random.default_rng(3), 0, []
    for _ in range(60):
        drawn = scores(0.4, -0.8, 1.0, 0.01, seeds, rng)
        a, b, _ = fit_trend(VALUES, drawn).draws.T
        low, high = np.quantile(a * (1 - 16.0**b), [0.025, 0.975])
        hits += low <= 0.4 * (1 - 16.0**-0.8) <= high
        ends = summary(drawn[0] - drawn[-1])  # Student's, without the curve
        widths.append((high - low) / (ends.high - ends.low))
    assert hits >= 52  # 95% of 60 are 57, with a standard error of 1.7
    assert 0.5 < np.mean(widths) < 1.2


def test_arms_without_a_trend_determine_no_exponent():
    drawn = np.random.default_rng(4).normal(1, 0.01, (5, 4))
    assert not fit_trend(VALUES, drawn).is_determined
    clear = scores(0.4, -0.8, 1.0, 0.001, 4, np.random.default_rng(4))
    assert fit_trend(VALUES, clear).is_determined


def test_a_curve_that_misses_an_arm_is_not_drawn():
    jump = scores(0.4, -0.8, 1.0, 0.001, 4, np.random.default_rng(4))
    assert fit_trend(VALUES, jump).is_drawn
    jump[3:] += 0.6
    trend = fit_trend(VALUES, jump)
    assert trend.is_determined and not trend.fits and not trend.is_drawn


@pytest.mark.parametrize(
    "values, seeds", [([1, 2, 4], 5), ([1, 2, 2, 4], 5), ([0, 1, 2, 4], 5)]
)
def test_too_little_gives_no_curve(values, seeds):
    assert fit_trend(np.array(values), np.ones((len(values), seeds))) is None
    assert fit_trend(VALUES, np.ones((5, 2))) is None
