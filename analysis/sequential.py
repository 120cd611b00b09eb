"""Looks at a sweep while seeds are being added, with error rates that still hold.

Scores are paired by seed, and the differences of an arm to the baseline are tested
after planned numbers of seeds, the looks. The boundaries spend the error rate over the
looks (Lan and DeMets 1983), so the probability of a false verdict at any look is at
most what it would be for one test. The intervals are repeated confidence intervals
(Jennison and Turnbull 1989): they hold simultaneously at all looks.

Boundaries are for t statistics, whose joint distribution over the looks does not depend
on the unknown spread: it is simulated, with a fixed seed. Normal approximations would
be far off with four seeds.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy

from headcount.analysis.significance import LEVEL, POWER

DRAWS = 2_000_000  # of simulated sweeps
VERDICTS = ("better", "worse", "equivalent", "undecided")


class Looks(NamedTuple):
    """A plan: after how many seeds arms are looked at, and what counts as no effect."""

    seeds: tuple[int, ...]  # ascending; the last is the most that an arm gets
    margin: float | None  # of equivalence, in the metric's unit; None: never equivalent
    num_arms: int  # compared with the baseline: the error rate is shared by them

    @property
    def level(self) -> float:
        """The error rate of one arm (Bonferroni)."""
        return LEVEL / self.num_arms


class Verdict(NamedTuple):
    """What is known of an arm's difference to the baseline at a look."""

    kind: str  # of VERDICTS
    mean: float
    low: float  # of the repeated confidence interval, at LEVEL over all arms and looks
    high: float
    num_seeds: int


def check_looks(seeds: tuple[int, ...]) -> None:
    """Raise a ValueError unless the looks are ascending, from two seeds on."""
    if not seeds or seeds[0] < 2:
        raise ValueError(
            f"--looks must start at 2 seeds or more, for a spread to judge by; got "
            f"{','.join(map(str, seeds))}."
        )
    if list(seeds) != sorted(set(seeds)):
        raise ValueError(f"--looks must be ascending, got {','.join(map(str, seeds))}.")


def default_looks(first: int, last: int) -> tuple[int, ...]:
    """Return looks at first, twice as many, and so on, up to last."""
    looks = [first]
    while looks[-1] * 2 < last:
        looks.append(looks[-1] * 2)
    return (*looks, last) if last > first else (first,)


def spent(level: float, seeds: tuple[int, ...]) -> np.ndarray:
    """Return the error rate that may be spent up to each look.

    The spending function is Lan and DeMets's approximation of Pocock's boundaries,
    level · ln(1 + (e - 1) t), at the share t of the seeds: it stops early when effects
    are large beside the spread, as those of bad arms are.
    """
    share = np.array(seeds) / seeds[-1]
    return level * np.log(1 + (np.e - 1) * share)


@lru_cache
def boundaries(
    seeds: tuple[int, ...], level: float, two_sided: bool = True
) -> tuple[float, ...]:
    """Return the critical t value of each look.

    If the differences are normal with mean 0, the probability that the t statistic (its
    absolute value if two-sided) ever exceeds its boundary is `level`.
    """
    total = spent(level, seeds)
    steps = np.diff(total, prepend=0.0)
    statistics = _null_statistics(seeds)
    if two_sided:
        statistics = np.abs(statistics)
    found, alive = [], np.ones(len(statistics), bool)
    tail = steps[0] / 2 if two_sided else steps[0]
    for look, step in enumerate(steps):
        if look == 0:  # exactly
            critical = float(scipy.stats.t.isf(tail, seeds[0] - 1))
        else:
            column = statistics[alive, look]
            cross = round(step * len(statistics))
            critical = float(np.partition(column, -cross - 1)[-cross - 1])
        found.append(critical)
        alive &= statistics[:, look] <= critical
    return tuple(found)


@lru_cache(maxsize=4)
def _null_statistics(seeds: tuple[int, ...]) -> np.ndarray:
    """Simulate t statistics at the looks without a difference, draws x looks."""
    mean, error = _null_moments(seeds, DRAWS)
    return mean / error


@lru_cache(maxsize=4)
def _null_moments(seeds: tuple[int, ...], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate means, and their standard errors, of differences from N(0, 1).

    The seeds between two looks enter through their sum and their sum of squares, which
    are drawn as such. Returns two arrays, draws x looks.
    """
    rng = np.random.default_rng(1983)
    total, squares = np.zeros(draws), np.zeros(draws)
    mean, error = (np.empty((draws, len(seeds)), np.float32) for _ in range(2))
    for look, (count, new) in enumerate(
        zip(seeds, np.diff(seeds, prepend=0), strict=True)
    ):
        added = np.sqrt(new) * rng.standard_normal(draws)
        total += added
        squares += added**2 / new
        if new > 1:
            squares += rng.chisquare(new - 1, draws)
        mean[:, look] = total / count
        error[:, look] = standard_error(total, squares, count)
    return mean, error


def standard_error(total: np.ndarray, squares: np.ndarray, count) -> np.ndarray:
    """Return the standard error of a mean, from the sum and the sum of squares."""
    variance = (squares - total**2 / count) / (count - 1)
    return np.sqrt(np.maximum(variance, 1e-300) / count)


def power(looks: Looks, effect: float) -> float:
    """Return how often an arm that is better gets this verdict, at any of the looks.

    Args:
        looks: the plan; its margin doesn't matter.
        effect: the true difference, in standard deviations of the paired differences.
    """
    mean, error = _null_moments(looks.seeds, DRAWS // 10)
    critical = np.array(boundaries(looks.seeds, looks.level), np.float32)
    return float((mean + np.float32(effect) > critical * error).any(1).mean())


def detectable(looks: Looks, wanted: float = POWER) -> float:
    """Return the smallest effect that the plan finds with a power of 80%.

    In standard deviations of the paired differences.
    """
    low, high = 0.0, 1.0
    while power(looks, high) < wanted:
        high *= 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(looks, middle) >= wanted else (middle, high)
    return high


def judge(
    differences: np.ndarray, looks: Looks, higher_is_better: bool = True
) -> Verdict:
    """Return the verdict on an arm after the looks that its seeds have reached.

    The first look that decides counts. "better" and "worse": the interval excludes 0.
    "equivalent": both one-sided tests reject that the difference is as large as the
    margin (Schuirmann 1987), at the same level. A false verdict of any kind implies a
    t statistic beyond its boundary at the true difference, so together they have at
    most the level.

    Args:
        differences: arm minus baseline, one per seed, in the order of the plan.
        looks: the plan.
        higher_is_better: of the metric.
    """
    differences = np.asarray(differences, float)
    reached = [n for n in looks.seeds if n <= len(differences)]
    if not reached:
        mean = float(differences.mean()) if len(differences) else np.nan
        return Verdict("undecided", mean, np.nan, np.nan, len(differences))
    two_sided = boundaries(looks.seeds, looks.level)
    one_sided = boundaries(looks.seeds, looks.level, two_sided=False)
    sign = 1 if higher_is_better else -1
    for look, count in enumerate(reached):
        some = differences[:count]
        mean, sd = some.mean(), some.std(ddof=1)
        half = two_sided[look] * sd / np.sqrt(count)
        narrow = one_sided[look] * sd / np.sqrt(count)
        low, high = mean - half, mean + half
        if sd <= 1e-12 * (1 + abs(mean)):  # nothing to judge the spread by
            kind = "undecided"
        elif low > 0 or high < 0:
            kind = "better" if sign * mean > 0 else "worse"
        elif looks.margin is not None and abs(mean) + narrow < looks.margin:
            kind = "equivalent"
        else:
            kind = "undecided"
        if kind != "undecided":
            break
    return Verdict(kind, float(mean), float(low), float(high), count)


class Decisions(NamedTuple):
    """The verdicts on one arm in many sweeps."""

    kinds: np.ndarray  # of indices into VERDICTS, sweeps
    seeds: np.ndarray  # number until the verdict, sweeps
    low: np.ndarray  # of the repeated confidence intervals, sweeps x looks
    high: np.ndarray


def decide(
    differences: np.ndarray, looks: Looks, higher_is_better: bool = True
) -> Decisions:
    """Judge many sweeps at once, each to its end; see `judge`.

    Args:
        differences: sweeps x seeds.
        looks: the plan.
        higher_is_better: of the metric.
    """
    counts = np.array(looks.seeds)
    two_sided = np.array(boundaries(looks.seeds, looks.level))
    one_sided = np.array(boundaries(looks.seeds, looks.level, two_sided=False))
    totals = differences.cumsum(-1)[:, counts - 1]
    squares = (differences**2).cumsum(-1)[:, counts - 1]
    means, error = totals / counts, standard_error(totals, squares, counts)
    low, high = means - two_sided * error, means + two_sided * error
    kinds = np.full(means.shape, VERDICTS.index("undecided"))
    if looks.margin is not None:
        inside = np.abs(means) + one_sided * error < looks.margin
        kinds[inside] = VERDICTS.index("equivalent")
    ups, downs = ("better", "worse") if higher_is_better else ("worse", "better")
    kinds[low > 0], kinds[high < 0] = VERDICTS.index(ups), VERDICTS.index(downs)
    decided = kinds != VERDICTS.index("undecided")
    first = np.where(decided.any(1), decided.argmax(1), len(counts) - 1)
    rows = np.arange(len(differences))
    return Decisions(kinds[rows, first], counts[first], low, high)


class Simulation(NamedTuple):
    """Many simulated sweeps of one arm with a known difference."""

    rates: dict[str, float]  # share of each verdict
    seeds: float  # mean number of seeds until the verdict
    covered: float  # share whose interval had the truth at every look


def simulate(differences: np.ndarray, truth: float, looks: Looks) -> Simulation:
    """Sum up the verdicts on an arm in many sweeps.

    Args:
        differences: sweeps x seeds.
        truth: their mean.
        looks: the plan.
    """
    found = decide(differences, looks)
    shares = np.bincount(found.kinds, minlength=len(VERDICTS)) / len(differences)
    rates = dict(zip(VERDICTS, shares.tolist(), strict=True))
    covered = ((found.low <= truth) & (truth <= found.high)).all(1).mean()
    return Simulation(rates, float(found.seeds.mean()), float(covered))
