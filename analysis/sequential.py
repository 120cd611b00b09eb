"""Group-sequential tests: look at a sweep while adding seeds, with valid error rates.

Scores are paired by seed, and an arm's differences from the baseline are tested after
planned numbers of seeds, called looks. The boundaries spend the error rate over the
looks (Lan and DeMets 1983), so the probability of a false verdict at any look is at
most that of a single test. The intervals are repeated confidence intervals (Jennison
and Turnbull 1989), which hold simultaneously at all looks.

The boundaries apply to t statistics. Their joint distribution over the looks does not
depend on the unknown spread, and is simulated with a fixed seed. Normal approximations
would be far off with only four seeds.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import scipy

from headcount.analysis.significance import LEVEL, POWER

DRAWS = 2_000_000  # simulated sweeps
FUTILITY = 0.1  # with a lower chance of a verdict, an arm gets no more seeds
TIES = 8  # after this many seeds with equal differences, no spread is expected
VERDICTS = ("better", "worse", "equivalent", "undecided")


class Looks(NamedTuple):
    """A plan: the numbers of seeds at which to look, and the equivalence margin."""

    seeds: tuple[int, ...]  # ascending; the last is the maximum per arm
    margin: float | None  # of equivalence, in the metric's unit; None: never equivalent
    num_arms: int  # arms compared with the baseline, which share the error rate

    @property
    def level(self) -> float:
        """The error rate of one arm (Bonferroni)."""
        return LEVEL / self.num_arms


class Verdict(NamedTuple):
    """The verdict on an arm's difference from the baseline at a look."""

    kind: str  # one of VERDICTS
    mean: float
    low: float  # of the repeated confidence interval, at LEVEL over all arms and looks
    high: float
    num_seeds: int
    # of a verdict at the last look; NaN: it has been reached, or can't be estimated
    chance: float = np.nan
    bound: float = np.nan  # on the size of the difference, by two one-sided tests

    @property
    def is_open(self) -> bool:
        """Whether an undecided arm has a fair chance of a verdict with more seeds."""
        return self.kind == "undecided" and not self.chance < FUTILITY


def check_looks(seeds: tuple[int, ...]) -> None:
    """Raise a ValueError unless looks are ascending and start at two seeds or more."""
    if not seeds or seeds[0] < 2:
        raise ValueError(
            f"The first look must be at 2 seeds or more, for a spread to judge by; got "
            f"{','.join(map(str, seeds))} (--seeds=FIRST:LAST, --looks)."
        )
    if list(seeds) != sorted(set(seeds)):
        raise ValueError(f"--looks must be ascending, got {','.join(map(str, seeds))}.")


def default_looks(first: int, last: int) -> tuple[int, ...]:
    """Return looks at 1, 1.5, 2, 3, 4, 6, ... times `first`, and at `last`."""
    powers = [first * 2**k for k in range(last.bit_length())]
    looks = {n for power in powers for n in (power, power * 3 // 2)}
    return (*sorted(n for n in looks if n < last), last)


def spent(level: float, seeds: tuple[int, ...]) -> np.ndarray:
    """Return the cumulative error rate that may be spent up to each look.

    The spending function is Lan and DeMets's approximation of Pocock's boundaries,
    level · ln(1 + (e - 1) t), at the fraction t of the seeds. It allows stopping early
    when effects are large relative to the spread, as they are for bad arms.
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
    mean, error = _null_moments(seeds, DRAWS)
    statistics = mean / error
    if two_sided:
        statistics = np.abs(statistics)
    critical_values, alive = [], np.ones(len(statistics), bool)
    tail = steps[0] / 2 if two_sided else steps[0]
    for look, step in enumerate(steps):
        if look == 0:  # exactly
            critical = float(scipy.stats.t.isf(tail, seeds[0] - 1))
        else:
            column = statistics[alive, look]
            cross = round(step * len(statistics))
            critical = float(np.partition(column, -cross - 1)[-cross - 1])
        critical_values.append(critical)
        alive &= statistics[:, look] <= critical
    return tuple(critical_values)


@lru_cache(maxsize=4)
def _null_moments(seeds: tuple[int, ...], draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Simulate means and standard errors of differences drawn from N(0, 1).

    The seeds between two looks only matter through their sum and sum of squares, which
    are sampled directly. Return two arrays, draws x looks.
    """
    rng = np.random.default_rng(1983)
    total, squares = np.zeros(draws), np.zeros(draws)
    mean, error = (np.empty((draws, len(seeds)), np.float32) for _ in range(2))
    for look, (count, num_new) in enumerate(
        zip(seeds, np.diff(seeds, prepend=0), strict=True)
    ):
        added = np.sqrt(num_new) * rng.standard_normal(draws)
        total += added
        squares += added**2 / num_new
        if num_new > 1:
            squares += rng.chisquare(num_new - 1, draws)
        mean[:, look] = total / count
        variance = (squares - total**2 / count) / (count - 1)
        error[:, look] = np.sqrt(np.maximum(variance, 1e-300) / count)
    return mean, error


def chance_of_verdict(means, sd, counts, looks: Looks) -> np.ndarray:
    """Return the predicted probability of a verdict at the last look.

    The mean of all seeds is predicted from the mean and the spread so far by Student's
    t, without any prior belief about the difference (predictive power; Spiegelhalter,
    Freedman and Blackburn 1986). The spread is assumed not to change, so with few seeds
    the prediction is too high, and an arm gets more seeds than it should.

    Args:
        means, sd: of the differences so far.
        counts: number of seeds so far, fewer than at the last look.
        looks: the plan.
    """
    last = looks.seeds[-1]
    two_sided, one_sided = (
        boundaries(looks.seeds, looks.level, two_sided=two)[-1] * sd / np.sqrt(last)
        for two in (True, False)
    )

    def below(limit):
        spread = sd * np.sqrt(1 / counts - 1 / last)
        return scipy.stats.t.cdf((limit - means) / spread, counts - 1)

    chance = 1 - below(two_sided) + below(-two_sided)
    if looks.margin is not None:
        inner = np.maximum(looks.margin - one_sided, 0)
        chance += below(inner) - below(-inner)
    return np.minimum(chance, 1)


def power(looks: Looks, effect: float) -> float:
    """Return the probability that a better arm gets this verdict at any of the looks.

    Arms that stop for lack of a chance of a verdict don't get it.

    Args:
        looks: the plan; its margin is not used.
        effect: the true difference, in standard deviations of the paired differences.
    """
    mean, error = _null_moments(looks.seeds, DRAWS // 10)
    critical = np.array(boundaries(looks.seeds, looks.level), np.float32)
    mean, alive = mean + np.float32(effect), np.ones(mean.shape, bool)
    for look, count in enumerate(looks.seeds[:-1]):
        hopeless = np.abs(mean[:, look]) < least_hopeful(looks, count) * error[:, look]
        alive[:, look + 1 :] &= ~hopeless[:, None]
    return float((alive & (mean > critical * error)).any(1).mean())


def least_hopeful(looks: Looks, count: int) -> float:
    """Return the t statistic at a look below which the chance of a verdict is too low.

    This ignores verdicts of equivalence.
    """

    def excess(t):
        plan = looks._replace(margin=None)
        return chance_of_verdict(t / np.sqrt(count), 1.0, count, plan) - FUTILITY

    return scipy.optimize.brentq(excess, 0, 100) if excess(0.0) < 0 else 0.0


def detectable(looks: Looks) -> float:
    """Return the smallest effect that the plan detects with a power of `POWER`.

    The unit is standard deviations of the paired differences.
    """
    low, high = 0.0, 1.0
    while power(looks, high) < POWER:
        high *= 2
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if power(looks, middle) >= POWER else (middle, high)
    return high


def judge(
    differences: np.ndarray,
    looks: Looks,
    higher_is_better: bool = True,
    last: bool = False,
) -> Verdict:
    """Return the verdict on an arm after the looks that its seeds have reached.

    The first decisive look counts, else the last one reached. An arm is "better" or
    "worse" if the interval excludes 0, and "equivalent" if two one-sided tests at the
    same level reject that the difference is as large as the margin (Schuirmann 1987). A
    false verdict of any kind implies that the t statistic at the true difference
    exceeds its boundary, so the total probability of false verdicts is at most the
    level.

    Args:
        differences: arm minus baseline, one per seed, in the order of the plan.
        looks: the plan.
        higher_is_better: whether higher values of the metric are better.
        last: use the last look instead, for questions other than when to stop; the
            intervals hold at every look.
    """
    differences = np.asarray(differences, float)
    if len(differences) < looks.seeds[0]:
        mean = float(differences.mean()) if len(differences) else np.nan
        return Verdict("undecided", mean, np.nan, np.nan, len(differences))
    decisions = decide(differences[None], looks, higher_is_better, last)
    count = int(decisions.seeds[0])
    look = looks.seeds.index(count)
    numbers = (
        float(x[0, look]) for x in (decisions.means, decisions.low, decisions.high)
    )
    kind = VERDICTS[decisions.kinds[0]]
    chance, bound = (float(x[0, look]) for x in (decisions.chances, decisions.bounds))
    return Verdict(kind, *numbers, count, chance, bound)


def unplanned_looks(earlier: Sequence[int], count: int) -> tuple[int, ...]:
    """Return the numbers of seeds at which results could be seen, the last at `count`.

    Args:
        earlier: numbers of seeds before some were added without planned looks.
        count: number of seeds now.
    """
    last = max(2, count)
    return (*(n for n in earlier if 2 <= n < last), last)


def judge_at_last(
    differences: list[float], seeds: tuple[int, ...] | None, num_arms: int
) -> Verdict:
    """Judge differences for another question than when to stop; see `judge`.

    Args:
        differences: arm minus baseline, one per seed.
        seeds: numbers of seeds at each look; None: one look.
        num_arms: number of arms that share the error rate.
    """
    seeds = seeds or (max(2, len(differences)),)
    return judge(differences, Looks(seeds, None, num_arms), last=True)


class Decisions(NamedTuple):
    """The verdicts on one arm in many sweeps."""

    kinds: np.ndarray  # indices into VERDICTS, sweeps
    seeds: np.ndarray  # number of seeds until the arm ends, sweeps
    means: np.ndarray  # of the differences, sweeps x looks reached
    low: np.ndarray  # of the repeated confidence intervals, sweeps x looks reached
    high: np.ndarray
    chances: np.ndarray  # of a verdict at the last look; NaN at that look
    bounds: np.ndarray  # on sizes, by two one-sided tests, sweeps x looks reached


def decide(
    differences: np.ndarray,
    looks: Looks,
    higher_is_better: bool = True,
    last: bool = False,
    stop_futile: bool = False,
) -> Decisions:
    """Judge many sweeps at once, which must have reached the first look.

    Args:
        differences: sweeps x seeds.
        looks, higher_is_better, last: see `judge`.
        stop_futile: end an arm at the first look with a chance of a verdict below
            `FUTILITY`, as sweeps do. This can't add false verdicts.
    """
    counts = np.array([n for n in looks.seeds if n <= differences.shape[1]])
    prefixes = [differences[:, :count] for count in counts]
    means = np.stack([prefix.mean(1) for prefix in prefixes], 1)
    sd = np.stack([prefix.std(1, ddof=1) for prefix in prefixes], 1)
    # NaN where the spread can't be estimated: no comparison below holds
    sd = np.where(sd <= 1e-12 * (1 + np.abs(means)), np.nan, sd)
    two_sided, one_sided = (
        np.array(boundaries(looks.seeds, looks.level, two_sided=two))[: len(counts)]
        for two in (True, False)
    )
    half, narrow = (t * sd / np.sqrt(counts) for t in (two_sided, one_sided))
    low, high, bounds = means - half, means + half, np.abs(means) + narrow
    kinds = np.full(means.shape, VERDICTS.index("undecided"))
    if looks.margin is not None:
        kinds[bounds < looks.margin] = VERDICTS.index("equivalent")
    ups, downs = ("better", "worse") if higher_is_better else ("worse", "better")
    kinds[low > 0], kinds[high < 0] = VERDICTS.index(ups), VERDICTS.index(downs)
    early = counts[counts < looks.seeds[-1]]
    chances = np.full(means.shape, np.nan)
    chances[:, : len(early)] = chance_of_verdict(
        means[:, : len(early)], sd[:, : len(early)], early, looks
    )
    chances[np.isnan(sd) & (counts >= TIES) & (counts < looks.seeds[-1])] = 0
    decisive = kinds != VERDICTS.index("undecided")
    if stop_futile:
        decisive |= chances < FUTILITY
    decisive[:, -1] = True  # the last look counts if no other one does
    chosen = np.full(len(kinds), len(counts) - 1) if last else decisive.argmax(1)
    rows = np.arange(len(kinds))
    of_each = means, low, high, chances, bounds
    return Decisions(kinds[rows, chosen], counts[chosen], *of_each)
