"""Statistics over a few seeds: intervals, differences from a baseline, seeds needed.

Scores are arrays with seeds as their last axis, `... R`. Seeds are paired: score i of
an arm and score i of the baseline have the same seed, so the effects of a seed on both
(the order of the data, the initial values) cancel in their difference.
"""

from typing import NamedTuple

import numpy as np
import scipy  # submodules are loaded lazily, on first use
from jaxtyping import Float

CONFIDENCE = 0.95  # of intervals
LEVEL = 0.05  # family-wise error rate over all comparisons of a metric
POWER = 0.8  # with which a difference should be detected; see `seeds_needed`
MAX_SEEDS = 10_000  # largest number that `seeds_needed` tries
MIN_SEEDS = 3  # for an interval in a figure


class Summary(NamedTuple):
    """Summary statistics of an arm's scores; all but the mean are NaN for R < 2."""

    mean: np.ndarray
    sd: np.ndarray  # over seeds, with R - 1 degrees of freedom
    low: np.ndarray  # of the interval of the mean
    high: np.ndarray


class Difference(NamedTuple):
    """An arm minus the baseline, paired by seed; all but the mean may be NaN."""

    mean: np.ndarray
    sd: np.ndarray  # of the differences over seeds
    low: np.ndarray  # of the interval of the mean difference
    high: np.ndarray
    p: np.ndarray  # two-sided, for no difference, not corrected


def summary(scores: Float[np.ndarray, "*batch R"], comparisons: int = 1) -> Summary:
    """Return mean, standard deviation and Student's 95% interval over seeds.

    Args:
        comparisons: number of intervals that hold at the same time (Bonferroni).
    """
    scores = np.asarray(scores, float)
    R = scores.shape[-1]
    mean = scores.mean(-1)
    if R < 2:
        nothing = np.full_like(mean, np.nan)
        return Summary(mean, nothing, nothing, nothing)
    sd = scores.std(-1, ddof=1)
    tail = (1 - CONFIDENCE) / 2 / comparisons
    half = scipy.stats.t.ppf(1 - tail, R - 1) * sd / np.sqrt(R)
    return Summary(mean, sd, mean - half, mean + half)


def difference(
    arm: Float[np.ndarray, "*batch R"], baseline: Float[np.ndarray, "*batch R"]
) -> Difference:
    """Compare an arm with the baseline by a paired t-test.

    Scores must be in the same order of seeds. If all seeds differ by exactly the same
    amount, as may happen with few examples, the spread can't be estimated, and
    everything but the mean is NaN.

    Raises:
        ValueError: the numbers of seeds differ.
    """
    arm, baseline = np.asarray(arm, float), np.asarray(baseline, float)
    if arm.shape[-1:] != baseline.shape[-1:]:
        raise ValueError(
            f"The arm and the baseline need scores of the same seeds, got the shapes "
            f"{arm.shape} and {baseline.shape}."
        )
    differences = arm - baseline
    mean, sd, low, high = summary(differences)
    varies = sd > 1e-9 * (1 + np.abs(mean))  # False for NaN
    differences = np.where(varies[..., None], differences, np.nan)
    p = (
        scipy.stats.ttest_1samp(differences, 0, axis=-1).pvalue
        if differences.shape[-1] > 1
        else sd
    )
    return Difference(mean, *(np.where(varies, x, np.nan) for x in (sd, low, high, p)))


def holm(p: Float[np.ndarray, "*batch A"]) -> Float[np.ndarray, "*batch A"]:
    """Correct p-values for A simultaneous comparisons (Holm 1979).

    If hypotheses with a corrected p-value of at most α are rejected, the probability of
    any false rejection is at most α, for any dependence between the comparisons. NaN
    (an arm that could not be tested) stays NaN and does not count as a comparison.
    """
    p = np.asarray(p, float)
    order = np.argsort(p, axis=-1)  # NaN last
    tested = np.sum(~np.isnan(p), axis=-1, keepdims=True)
    factors = np.maximum(tested - np.arange(p.shape[-1]), 1)
    sorted_p = np.take_along_axis(p, order, -1) * factors
    corrected = np.minimum(np.maximum.accumulate(sorted_p, axis=-1), 1.0)
    return np.take_along_axis(corrected, np.argsort(order, axis=-1), -1)


def seeds_needed(sd: float, margin: float, comparisons: int = 1) -> float | None:
    """Return the number of seeds a paired t-test needs to detect a difference.

    This is the smallest R with a power of 80%, by the noncentral t distribution, at the
    level that Holm's correction requires of the smallest p-value, LEVEL / comparisons.
    The levels of the other p-values are higher, so this is enough for them, too.

    Args:
        sd: observed standard deviation over seeds of the differences from the baseline.
        margin: the true difference.
        comparisons: number of tested arms, including this one.

    Returns:
        R; infinity if it exceeds MAX_SEEDS; None if sd is unknown.
    """
    if not np.isfinite(sd):
        return None
    R = np.arange(2, MAX_SEEDS + 1)
    critical = scipy.stats.t.isf(LEVEL / comparisons / 2, R - 1)
    shift = margin * np.sqrt(R) / max(sd, 1e-12)
    # The other tail is negligible, and scipy's nct is inaccurate there. Beyond a shift
    # of 30, nct overflows, and only the variation of the estimated sd matters.
    near = shift < 30
    power = scipy.stats.chi2.cdf((R - 1) * (shift / critical) ** 2, R - 1)
    power[near] = scipy.stats.nct.sf(critical[near], R[near] - 1, shift[near])
    enough = np.flatnonzero(power >= POWER)
    return int(R[enough[0]]) if len(enough) else np.inf
