"""Planned looks: error rates, coverage and savings hold in simulated sweeps."""

import numpy as np
import pytest
from scipy import stats

from headcount.analysis import sequential
from headcount.analysis.sequential import (
    LEVEL,
    VERDICTS,
    Looks,
    boundaries,
    check_looks,
    decide,
    default_looks,
    detectable,
    judge,
    power,
)
from headcount.analysis.significance import POWER, seeds_needed
from tests.marks import slow_but
from tests.simulated_sweeps import simulate

PLAN = Looks((4, 8, 16, 32), 0.5, 5)
SWEEPS = 100_000


def differences(mean, sd=1.0, seed=0, draw="normal"):
    """Return simulated differences, sweeps x seeds, by another generator's stream."""
    rng = np.random.default_rng([seed, 7])
    shape = (SWEEPS, PLAN.seeds[-1])
    if draw == "uniform":
        return mean + sd * rng.uniform(-(3**0.5), 3**0.5, shape)
    return mean + sd * rng.standard_normal(shape)


def sampling_error(rate):
    """Return four standard errors of a simulated rate."""
    return 4 * (rate * (1 - rate) / SWEEPS) ** 0.5


def false_rate(drawn):
    """Return the rate of better and worse without a difference."""
    # without a margin: equivalence may end a sweep before a false verdict
    rates = simulate(drawn, 0.0, PLAN._replace(margin=None)).rates
    return rates["better"] + rates["worse"]


@pytest.mark.parametrize("sd", [0.01, 1.0, 30.0])
def test_false_verdicts_are_as_rare_as_planned_whatever_the_spread(sd):
    rate = false_rate(differences(0.0, sd))
    assert abs(rate - PLAN.level) <= sampling_error(PLAN.level)


def test_false_verdicts_stay_below_twice_the_plan_for_uniform_differences():
    """As for any t test of few samples; docs/guides/sweeps.md states the rate."""
    assert PLAN.level < false_rate(differences(0.0, draw="uniform")) < 2 * PLAN.level


@pytest.mark.parametrize("sign", slow_but([-1], [-1, 1]))
def test_equivalence_is_rarely_claimed_at_the_margin(sign):
    """A difference of exactly the margin is not within it, at any spread."""
    for sd in (0.3, 1.0, 3.0):
        drawn = differences(sign * PLAN.margin, sd)
        rates = simulate(drawn, sign * PLAN.margin, PLAN).rates
        wrong = rates["equivalent"] + rates["worse" if sign > 0 else "better"]
        assert wrong <= PLAN.level + sampling_error(PLAN.level)


def test_intervals_hold_at_all_looks_at_once():
    for truth in (0.0, 0.2, 3.0):
        found = simulate(differences(truth), truth, PLAN)
        assert found.covered >= 1 - PLAN.level - sampling_error(PLAN.level)


@pytest.mark.parametrize("draw", ["normal", "heavy", "skewed", "uniform"])
def test_any_false_verdict_over_all_arms_is_at_most_5_percent(draw):
    """Of arms that share a baseline, whatever the distribution of scores over seeds."""
    rng = np.random.default_rng([3, 7])
    shape = (PLAN.num_arms + 1, SWEEPS // 5, PLAN.seeds[-1])
    scores = {
        "normal": lambda: rng.standard_normal(shape),
        "heavy": lambda: rng.standard_t(3, shape),
        "skewed": lambda: rng.exponential(1.0, shape),
        "uniform": lambda: rng.uniform(-1, 1, shape),
    }[draw]()
    false, plan = np.zeros(shape[1], bool), PLAN._replace(margin=None)
    for arm in scores[1:]:
        found = decide(arm - scores[0], plan)
        false |= found.kinds != VERDICTS.index("undecided")
    assert 0.01 < false.mean() < LEVEL + 4 * (LEVEL * (1 - LEVEL) / shape[1]) ** 0.5


@pytest.mark.parametrize("seeds", [(16,), (4, 8, 16, 32)])
def test_the_power_is_as_planned(seeds):
    """By another generator's stream, and within two points."""
    plan = Looks(seeds, None, PLAN.num_arms)
    effect = detectable(plan)
    assert power(plan, effect) == pytest.approx(POWER, abs=0.003)
    found = simulate(differences(effect), effect, plan)
    assert found.rates["better"] == pytest.approx(POWER, abs=0.02)


def test_the_effect_found_by_one_look_is_that_of_the_t_test():
    effect = detectable(Looks((16,), None, 5))
    assert seeds_needed(1.0, 1.01 * effect, 5) == 16
    assert seeds_needed(1.0, 0.99 * effect, 5) == 17


def test_large_effects_stop_early_and_are_found():
    """They need few of the 32 seeds that a fixed sweep would give every arm."""
    found = simulate(differences(3.0), 3.0, PLAN)
    assert found.rates["better"] > 0.99
    assert found.seeds < 10
    small = simulate(differences(0.05, sd=0.4), 0.05, PLAN)
    assert small.rates["equivalent"] > 0.9 and small.seeds < 32


def test_a_single_look_is_the_t_test():
    (boundary,) = boundaries((6,), 0.01)
    assert boundary == pytest.approx(stats.t.isf(0.005, 5))
    each = np.array([0.1, 0.4, -0.2, 0.3, 0.2, 0.5])
    verdict = judge(each, Looks((6,), None, 1))
    interval = stats.ttest_1samp(each, 0).confidence_interval(1 - LEVEL)
    assert (verdict.low, verdict.high) == pytest.approx(tuple(interval))


def test_repeated_looks_need_higher_boundaries_than_one():
    several = boundaries(PLAN.seeds, 0.05)
    for boundary, count in zip(several, PLAN.seeds, strict=True):
        assert boundary > stats.t.isf(0.025, count - 1)


def test_the_direction_is_that_of_the_metric():
    clear = np.array([1.0, 1.1, 0.9, 1.05])
    plan = Looks((4,), None, 1)
    assert judge(clear, plan).kind == "better"
    assert judge(clear, plan, higher_is_better=False).kind == "worse"
    found = judge(np.ones(4), plan)  # no spread to judge by
    assert found.kind == "undecided" and np.isnan([found.low, found.high]).all()
    assert decide(np.ones((1, 4)), plan).kinds == [VERDICTS.index("undecided")]
    assert judge(clear[:3], plan).kind == "undecided"  # before the first look


def test_looks_are_checked():
    assert default_looks(4, 32) == (4, 6, 8, 12, 16, 24, 32)
    assert default_looks(4, 20) == (4, 6, 8, 12, 16, 20)
    assert default_looks(2, 8) == (2, 3, 4, 6, 8)
    assert default_looks(3, 3) == (3,)
    for bad in ((1, 4), (), (4, 4), (8, 4)):
        with pytest.raises(ValueError, match="--looks"):
            check_looks(bad)


@pytest.mark.parametrize("margin", [None, 0.16])
@pytest.mark.parametrize("mean", [0.0, 0.06, 0.1, 0.2])
def test_the_chance_of_a_verdict_is_how_often_the_last_look_gives_one(mean, margin):
    """With so many seeds that the spread is known; without a prior on the truth."""
    looks, rng = Looks((300, 600), margin, 1), np.random.default_rng(3)
    truth = mean + rng.standard_normal(20_000) / 300**0.5
    last = (mean + truth + rng.standard_normal(20_000) / 300**0.5) / 2
    two_sided, one_sided = (
        boundaries(looks.seeds, looks.level, two)[-1] / 600**0.5
        for two in (True, False)
    )
    wanted = np.abs(last) > two_sided
    if margin is not None:
        wanted |= np.abs(last) + one_sided < margin
    found = sequential.chance_of_verdict(mean, 1.0, 300, looks)
    assert found == pytest.approx(wanted.mean(), abs=0.015)


def test_the_least_hopeful_statistic_has_just_the_chance_that_is_required():
    looks = Looks((4, 8, 16), None, 5)
    t = sequential.least_hopeful(looks, 8)
    chance = sequential.chance_of_verdict(t / 8**0.5, 1.0, 8, looks)
    assert t > 0 and chance == pytest.approx(sequential.FUTILITY)
    assert sequential.least_hopeful(looks, 4) == 0  # four seeds show too little


@pytest.mark.parametrize("difference", [0.0, -3.0])
def test_equal_differences_end_an_arm_after_eight_seeds(difference):
    looks = Looks((2, 4, 8, 12, 16), 1.0, 2)
    for seeds, is_open in ((2, True), (7, True), (8, False), (12, False)):
        found = judge([difference] * seeds, looks)
        assert found.kind == "undecided" and found.is_open == is_open
    assert np.isnan(judge([difference] * 16, looks).chance)


def test_a_verdict_after_a_look_without_much_hope_counts():
    """As in a sweep of before, or in one that has got more seeds."""
    looks = Looks((8, 16), None, 1)
    each = np.array([0.0, 0.3, -0.3, 0.1, 0.0, -0.1, 0.2, -0.2, *[0.3, 0.5] * 4])
    early = judge(each[:8], looks)
    assert early.kind == "undecided" and not early.is_open
    late = judge(each, looks)
    assert (late.kind, late.num_seeds) == ("better", 16)
    stopped = decide(each[None], looks, stop_futile=True)
    assert stopped.seeds == [8] and stopped.kinds == [VERDICTS.index("undecided")]
