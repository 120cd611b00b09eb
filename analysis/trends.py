"""Fit the loss against a swept number: a·n^b + c, with intervals over seeds.

For every exponent of a grid, a and c follow by least squares, so the fit needs no
initial guess and can't get stuck. The bootstrap resamples seeds jointly for all arms,
because arms are paired by seed. Resampled means vary too little with few seeds, so
their deviations are expanded to those of Student's interval (Hesterberg 2015).
"""

from typing import NamedTuple

import numpy as np
import scipy
from jaxtyping import Float

from headcount.analysis.significance import CONFIDENCE, MIN_SEEDS

EXPONENTS = np.array([b for b in np.round(np.arange(-4, 4.01, 0.02), 2) if b != 0])
MIN_VALUES = 4  # different swept numbers; the curve has three parameters
DRAWS = 1000  # of the bootstrap


class Trend(NamedTuple):
    """A fitted curve; each parameter has its value and the ends of its interval."""

    a: tuple[float, float, float]
    b: tuple[float, float, float]
    c: tuple[float, float, float]
    residual: float  # largest absolute residual of an arm's mean
    fits: bool  # whether each arm's 95% interval contains the curve
    draws: np.ndarray  # a, b, c of the bootstrap, draws x 3

    @property
    def is_drawn(self) -> bool:
        """Whether the curve describes the arms, so that a figure may show it."""
        return self.is_determined and self.fits

    @property
    def is_determined(self) -> bool:
        """Whether the interval of the exponent ends within the grid."""
        return EXPONENTS[0] < self.b[1] and self.b[2] < EXPONENTS[-1]

    def at(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the curve at the given numbers, and its pointwise interval."""
        mean = self.a[0] * values ** self.b[0] + self.c[0]
        a, b, c = self.draws.T[..., None]
        return mean, *np.quantile(a * values**b + c, QUANTILES, axis=0)


QUANTILES = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)


def fit_trend(
    values: Float[np.ndarray, " A"], scores: Float[np.ndarray, "A R"]
) -> Trend | None:
    """Fit a·n^b + c to the means of arms over seeds.

    Returns:
        The curve; None with fewer than four different numbers or three seeds, if a
        number is not positive, or if all scores are equal.
    """
    values = np.asarray(values, float)
    seeds = scores.shape[1]
    is_enough = len(set(values)) >= MIN_VALUES and seeds >= MIN_SEEDS
    if not is_enough or min(values) <= 0 or np.ptp(scores) == 0:
        return None
    rng = np.random.default_rng(0)
    counts = rng.multinomial(seeds, np.full(seeds, 1 / seeds), DRAWS)
    means = np.concatenate([scores.mean(1)[None], counts @ scores.T / seeds])
    t, z = (of.ppf(QUANTILES[1]) for of in (scipy.stats.t(seeds - 1), scipy.stats.norm))
    expansion = t / z * (seeds / (seeds - 1)) ** 0.5
    means[1:] = means[0] + expansion * (means[1:] - means[0])
    parameters = least_squares(values, means)
    lows, highs = np.quantile(parameters[1:], QUANTILES, axis=0)
    a, b, c = zip(parameters[0].tolist(), lows.tolist(), highs.tolist(), strict=True)
    residuals = np.abs(a[0] * values ** b[0] + c[0] - means[0])
    half = t * scipy.stats.sem(scores, axis=1) + 1e-9  # without spread: for rounding
    fits = bool((residuals <= half).all())
    return Trend(a, b, c, float(residuals.max()), fits, parameters[1:])


def least_squares(
    values: Float[np.ndarray, " A"], means: Float[np.ndarray, "M A"]
) -> Float[np.ndarray, "M 3"]:
    """Return a, b and c of the best-fitting curve for each row of means."""
    best = np.full(len(means), np.inf)
    parameters = np.zeros((len(means), 3))
    center = np.exp(np.log(values).mean())  # keeps powers near 1
    for b in EXPONENTS:
        design = np.stack([(values / center) ** b, np.ones_like(values)], 1)
        solution = means @ np.linalg.pinv(design).T
        errors = ((solution @ design.T - means) ** 2).sum(1)
        better = errors < best
        best[better] = errors[better]
        a = solution[:, 0] * center**-b
        fitted = np.stack([a, np.full_like(a, b), solution[:, 1]], 1)
        parameters[better] = fitted[better]
    return parameters
