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
from scipy import stats

LEVEL = 0.05  # of false verdicts, over all arms and looks
DRAWS = 2_000_000
CHUNK = 100_000
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
    low: float  # of the repeated confidence interval, LEVEL over all arms and looks
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
            critical = float(stats.t.isf(tail, seeds[0] - 1))
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
    rng = np.random.default_rng(1983)
    parts = []
    for _ in range(DRAWS // CHUNK):
        parts.append(t_statistics(rng.standard_normal((CHUNK, seeds[-1])), seeds))
    return np.concatenate(parts)


def t_statistics(differences: np.ndarray, seeds: tuple[int, ...]) -> np.ndarray:
    """Return the t statistics of the first so many differences, ... x looks."""
    counts = np.array(seeds)
    total = differences.cumsum(-1)[..., counts - 1]
    squares = (differences**2).cumsum(-1)[..., counts - 1]
    mean = total / counts
    variance = (squares - counts * mean**2) / (counts - 1)
    return (mean / np.sqrt(np.maximum(variance, 1e-300) / counts)).astype(np.float32)


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
        kind = "undecided"
        if sd <= 1e-12 * (1 + abs(mean)):
            pass  # identical differences: nothing to judge the spread by
        elif low > 0 or high < 0:
            kind = "better" if sign * mean > 0 else "worse"
        elif looks.margin is not None and abs(mean) + narrow < looks.margin:
            kind = "equivalent"
        if kind != "undecided":
            break
    return Verdict(kind, float(mean), float(low), float(high), count)


class Simulation(NamedTuple):
    """Many simulated sweeps of one arm with a known difference."""

    rates: dict[str, float]  # share of each verdict
    seeds: float  # mean number of seeds until the verdict
    covered: float  # share whose interval had the truth at every look


def simulate(differences: np.ndarray, truth: float, looks: Looks) -> Simulation:
    """Judge many sweeps at once.

    Args:
        differences: sweeps x seeds.
        truth: their mean.
        looks: the plan.
    """
    counts = np.array(looks.seeds)
    two_sided = np.array(boundaries(looks.seeds, looks.level))
    one_sided = np.array(boundaries(looks.seeds, looks.level, two_sided=False))
    means = differences.cumsum(-1)[:, counts - 1] / counts
    squares = (differences**2).cumsum(-1)[:, counts - 1]
    error = np.sqrt((squares - counts * means**2) / (counts - 1) / counts)
    low, high = means - two_sided * error, means + two_sided * error
    better, worse = low > 0, high < 0
    equivalent = np.zeros_like(better)
    if looks.margin is not None:
        inside = np.abs(means) + one_sided * error < looks.margin
        equivalent = inside & ~better & ~worse
    decided = better | worse | equivalent
    first = np.where(decided.any(1), decided.argmax(1), len(counts) - 1)
    rows = np.arange(len(differences))
    rates = {
        "better": better[rows, first].mean(),
        "worse": worse[rows, first].mean(),
        "equivalent": equivalent[rows, first].mean(),
    }
    rates = {name: float(rate) for name, rate in rates.items()}
    rates["undecided"] = 1 - sum(rates.values())
    covered = ((low <= truth) & (truth <= high)).all(1).mean()
    return Simulation(rates, float(counts[first].mean()), float(covered))
