"""What a few seeds can say: intervals, differences to a baseline, seeds needed.

Scores are arrays with seeds as their last axis, `... R`. Seeds are paired: score i of
an arm and score i of the baseline have the same seed, so what a seed does to both (the
order of the data, the initial values) cancels in their difference.
"""

from typing import NamedTuple

import numpy as np
import scipy  # its parts load where they are first used
from jaxtyping import Float

CONFIDENCE = 0.95  # of intervals
LEVEL = 0.05  # family-wise error rate over all comparisons of a metric
POWER = 0.8  # with which `seeds_needed` finds a difference
MAX_SEEDS = 10_000  # that `seeds_needed` tries
MIN_SEEDS = 3  # for an interval in a figure


class Summary(NamedTuple):
    """The scores of one arm; NaN where there are too few seeds."""

    mean: np.ndarray
    sd: np.ndarray  # over seeds, with R - 1
    low: np.ndarray  # of the interval of the mean
    high: np.ndarray


class Difference(NamedTuple):
    """An arm minus the baseline, paired by seed; NaN with fewer than two seeds."""

    mean: np.ndarray
    sd: np.ndarray  # of the differences over seeds
    low: np.ndarray  # of the interval of the mean difference
    high: np.ndarray
    p: np.ndarray  # two-sided, of no difference, not corrected


def summary(scores: Float[np.ndarray, "*batch R"]) -> Summary:
    """Return mean, standard deviation and Student's 95% interval over seeds."""
    scores = np.asarray(scores, float)
    R = scores.shape[-1]
    mean = scores.mean(-1)
    if R < 2:
        nothing = np.full_like(mean, np.nan)
        return Summary(mean, nothing, nothing, nothing)
    sd = scores.std(-1, ddof=1)
    half = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, R - 1) * sd / np.sqrt(R)
    return Summary(mean, sd, mean - half, mean + half)


def difference(
    arm: Float[np.ndarray, "*batch R"], baseline: Float[np.ndarray, "*batch R"]
) -> Difference:
    """Compare an arm with the baseline by a paired t-test, in the same order of seeds.

    If every seed differs by exactly the same amount, as scores of few examples may,
    there is no spread to judge by: everything but the mean is NaN.
    """
    each = np.asarray(arm, float) - np.asarray(baseline, float)
    mean, sd, low, high = summary(each)
    varies = sd > 1e-9 * (1 + np.abs(mean))  # False for NaN
    each = np.where(varies[..., None], each, np.nan)
    p = scipy.stats.ttest_1samp(each, 0, axis=-1).pvalue if each.shape[-1] > 1 else sd
    return Difference(mean, *(np.where(varies, x, np.nan) for x in (sd, low, high, p)))


def holm(p: Float[np.ndarray, "*batch A"]) -> Float[np.ndarray, "*batch A"]:
    """Correct p-values for A comparisons at once (Holm 1979).

    Rejecting where the result is at most α, the probability of any false rejection is
    at most α, however the comparisons depend on each other. NaN (an arm that could not
    be tested) stays NaN and does not count.
    """
    p = np.asarray(p, float)
    order = np.argsort(p, axis=-1)  # NaN last
    tested = np.sum(~np.isnan(p), axis=-1, keepdims=True)
    factors = np.maximum(tested - np.arange(p.shape[-1]), 1)
    sorted_p = np.take_along_axis(p, order, -1) * factors
    corrected = np.minimum(np.maximum.accumulate(sorted_p, axis=-1), 1.0)
    return np.take_along_axis(corrected, np.argsort(order, axis=-1), -1)


def seeds_needed(sd: float, margin: float, comparisons: int = 1) -> float | None:
    """Return how many seeds a paired t-test needs to find a difference of `margin`.

    The smallest R whose power, by the noncentral t distribution, is 80% at the level
    that Holm's correction requires of the smallest p-value, LEVEL / comparisons. The
    levels of the other p-values are higher, so what is found at this level is found.

    Args:
        sd: of the differences to the baseline over seeds, as observed.
        margin: the true difference.
        comparisons: number of arms that are tested, this one included.

    Returns:
        R; infinity beyond MAX_SEEDS; None if sd is unknown.
    """
    if not np.isfinite(sd):
        return None
    R = np.arange(2, MAX_SEEDS + 1)
    critical = scipy.stats.t.isf(LEVEL / comparisons / 2, R - 1)
    shift = margin * np.sqrt(R) / max(sd, 1e-12)
    # The other tail is negligible, and scipy's nct is inaccurate there. Beyond a shift
    # of 30 nct overflows, and the spread is that of the estimated sd alone.
    near = shift < 30
    power = scipy.stats.chi2.cdf((R - 1) * (shift / critical) ** 2, R - 1)
    power[near] = scipy.stats.nct.sf(critical[near], R[near] - 1, shift[near])
    enough = np.flatnonzero(power >= POWER)
    return int(R[enough[0]]) if len(enough) else np.inf
