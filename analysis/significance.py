"""What a few seeds can say: intervals, differences to a baseline, seeds needed.

Scores are arrays R (one a seed) or `... R`; seeds are paired: score i of an arm and
score i of the baseline have the same seed, so that what a seed does to both (the same
order of the data, the same vocabulary) cancels in their difference.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
LEVEL = 0.05  # of false alarms, in all comparisons of a report
SEEN = 0.3  # points of BLEU: as large as the published effects of head counts
POWER = 0.8
MOST_SEEDS = 10_000  # beyond, how many are needed is not told


class Summary(NamedTuple):
    """Of the scores of one arm; NaN where there are too few seeds to tell."""

    mean: np.ndarray
    sd: np.ndarray  # of a seed, with R - 1
    low: np.ndarray  # of the interval of the mean
    high: np.ndarray


class Difference(NamedTuple):
    """Of an arm to the baseline, seed by seed; NaN with fewer than two seeds."""

    mean: np.ndarray
    sd: np.ndarray  # of one seed's difference
    low: np.ndarray  # of the interval of the mean difference
    high: np.ndarray
    p: np.ndarray  # two-sided, of no difference, not yet corrected


def summary(scores: np.ndarray) -> Summary:
    """Mean, standard deviation and Student's 95 % interval over seeds, `... R`."""
    scores = np.asarray(scores, float)
    R = scores.shape[-1]
    mean = scores.mean(-1)
    if R < 2:
        nothing = np.full_like(mean, np.nan)
        return Summary(mean, nothing, nothing, nothing)
    sd = scores.std(-1, ddof=1)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, R - 1) * sd / np.sqrt(R)
    return Summary(mean, sd, mean - half, mean + half)


def difference(arm: np.ndarray, baseline: np.ndarray) -> Difference:
    """The paired t-test of an arm and the baseline, both `... R` in order of seeds.

    Where every seed differs by the very same amount, as scores of few sentences may,
    there is no spread to judge by: all but the mean is NaN.
    """
    each = np.asarray(arm, float) - np.asarray(baseline, float)
    mean, sd, low, high = summary(each)
    varies = sd > 1e-9 * (1 + np.abs(mean))  # False for NaN
    each = np.where(varies[..., None], each, np.nan)
    p = stats.ttest_1samp(each, 0, axis=-1).pvalue if each.shape[-1] > 1 else sd
    return Difference(mean, *(np.where(varies, x, np.nan) for x in (sd, low, high, p)))


def holm(p: np.ndarray) -> np.ndarray:
    """Correct p-values, `... A`, for A comparisons at once (Holm 1979).

    Rejecting where the result is at most α, the probability of any false alarm is at
    most α, however the comparisons depend on each other. NaN (an arm that could not
    be tested) stays NaN and counts for nothing.
    """
    p = np.asarray(p, float)
    order = np.argsort(p, axis=-1)  # NaN last
    tested = np.sum(~np.isnan(p), axis=-1, keepdims=True)
    factors = np.maximum(tested - np.arange(p.shape[-1]), 1)
    sorted_p = np.take_along_axis(p, order, -1) * factors
    corrected = np.minimum(np.maximum.accumulate(sorted_p, axis=-1), 1.0)
    return np.take_along_axis(corrected, np.argsort(order, axis=-1), -1)


def seeds_needed(sd: float, comparisons: int = 1) -> float | None:
    """How many seeds a paired t-test needs to see a difference of SEEN, among others.

    The smallest R whose power, by the noncentral t distribution, is 80 % at the level
    that Holm's correction asks of the smallest p-value, LEVEL / comparisons. That of a
    later one may be higher: what is seen at this level is seen in any case.

    Args:
        sd: of one seed's difference to the baseline, as observed.
        comparisons: arms that are tested, this one among them.

    Returns:
        R; infinity beyond MOST_SEEDS; None where sd is unknown.
    """
    if not np.isfinite(sd):
        return None
    R = np.arange(2, MOST_SEEDS + 1)
    critical = stats.t.isf(LEVEL / comparisons / 2, R - 1)
    shift = SEEN * np.sqrt(R) / max(sd, 1e-12)
    # The other tail holds nothing worth counting, and scipy's nct is unsure there.
    # Beyond a shift of 30 nct overflows, and the spread is the estimated sd's alone.
    near = shift < 30
    power = stats.chi2.cdf((R - 1) * (shift / critical) ** 2, R - 1)
    power[near] = stats.nct.sf(critical[near], R[near] - 1, shift[near])
    enough = np.flatnonzero(power >= POWER)
    return int(R[enough[0]]) if len(enough) else np.inf


class Bootstrap(NamedTuple):
    """Of one trained model's translations: what other test sentences might give."""

    score: float
    half_width: float  # of the 95 % interval of the score
    p: float | None  # of no difference to the baseline; None: it is the baseline


def paired_bootstrap(
    systems: dict[str, Sequence[str]],
    references: Sequence[str],
    samples: int = 1000,
    metric: str = "bleu",
) -> dict[str, Bootstrap]:
    """sacreBLEU's paired bootstrap over sentences (Koehn 2004), by system.

    Args:
        systems: the translations of each; the first is the baseline.
        references: one a sentence.
        samples: how often the test set is drawn anew.
        metric: "bleu" or "chrf", as sacreBLEU has them by default.
    """
    import logging

    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)  # it tells every step
    named = [(name, list(lines)) for name, lines in systems.items()]
    if len(named) == 1:  # it refuses one system alone; beside itself it is the same
        named.append((named[0][0] + " again", named[0][1]))
    name, of = {"bleu": ("BLEU", BLEU), "chrf": ("chrF2", CHRF)}[metric]
    metrics = {name: of()}
    test = PairedTest(named, metrics, [list(references)], "bs", n_samples=samples)
    found = test()[1]  # before it the signatures
    bootstraps = {
        name: Bootstrap(result.score, float(result.ci), result.p_value)
        for name, result in zip(systems, found[name], strict=False)
    }
    score = bootstraps[named[0][0]].score
    for other, found in bootstraps.items():
        # sacreBLEU calls equal scores different: no resampled one exceeds 0 by 0
        if found.p is not None and found.score == score:
            bootstraps[other] = found._replace(p=1.0)
    return bootstraps
