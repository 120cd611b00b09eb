"""Intervals and p-values on thousands of simulated sweeps whose truth is known."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from headcount.analysis.report import Comparison, Report, compare, scores_table, verdict
from headcount.analysis.report_legends import how_to_read_others, how_to_read_scores
from headcount.analysis.significance import (
    difference,
    holm,
    paired_bootstrap,
    seeds_needed,
    summary,
)

SWEEPS, ARMS, SEEDS = 8000, 6, 3
SEED_SPREAD, NOISE = 0.25, 0.2  # what a seed does to every arm, and to one alone


def simulate(differences, seeds=SEEDS, sweeps=SWEEPS):
    """Scores of many sweeps, `sweeps, arms, seeds`; the first arm is the baseline."""
    rng = np.random.default_rng(2017)
    shared = rng.normal(0, SEED_SPREAD, (sweeps, 1, seeds))
    alone = rng.normal(0, NOISE, (sweeps, len(differences), seeds))
    return 35 + np.asarray(differences, float)[:, None] + shared + alone


def covered(low, high, truth):
    return np.mean((low <= truth) & (truth <= high))


@pytest.mark.parametrize("seeds", [2, 3, 5, 16])
def test_intervals_cover_the_truth(seeds):
    truth = np.array([0, -0.9, -0.3, 0, 0.1, 0.3])
    scores = simulate(truth, seeds)
    of = summary(scores)
    assert covered(of.low, of.high, 35 + truth) == pytest.approx(0.95, abs=0.02)
    paired = difference(scores[:, 1:], scores[:, :1])
    assert covered(paired.low, paired.high, truth[1:]) == pytest.approx(0.95, abs=0.02)
    np.testing.assert_allclose(paired.mean.mean(0), truth[1:], atol=0.02)


@pytest.mark.parametrize("truth", [[0] * 6, [0, 0, 0, 0, -2, 3]])
def test_few_sweeps_raise_a_false_alarm(truth):
    """In under 5 % of sweeps is any arm that is like the baseline called different."""
    scores = simulate(truth)
    p = difference(scores[:, 1:], scores[:, :1]).p
    same = np.equal(truth[1:], 0)
    assert np.mean((holm(p) <= 0.05)[:, same].any(1)) < 0.05
    assert np.mean((p <= 0.05)[:, same].any(1)) > 0.07  # so many, uncorrected


def test_pairing_sees_what_the_seeds_share():
    scores = simulate([0, 0.5], seeds=5)
    paired = difference(scores[:, 1], scores[:, 0]).p
    apart = stats.ttest_ind(scores[:, 1], scores[:, 0], axis=-1).pvalue
    assert np.mean(paired <= 0.05) > np.mean(apart <= 0.05) + 0.1


def test_the_seeds_needed_see_the_difference():
    """Of simulated sweeps with as many seeds as were asked for, 80 % see 0.3."""
    sd = NOISE * np.sqrt(2)
    seeds = seeds_needed(sd)
    seen = [
        np.mean(difference(scores[:, 1], scores[:, 0]).p <= 0.05)
        for scores in (simulate([0, 0.3], seeds), simulate([0, 0.3], seeds - 1))
    ]
    assert seen[0] > 0.79 and seen[1] < 0.81
    assert seeds_needed(0.01) == 2 and seeds_needed(0.0) == 2
    assert seeds_needed(float("nan")) is None and seeds_needed(1e4) == np.inf


@pytest.mark.parametrize("tested", [2, 5, 9])
def test_the_seeds_needed_see_the_difference_when_corrected(tested):
    """Of as many arms one differs by 0.3: four sweeps of five see it after Holm."""
    seeds = seeds_needed(NOISE * np.sqrt(2), tested)
    truth = [0, 0.3] + [0] * (tested - 1)
    for count, low, high in ((seeds, 0.79, 0.9), (seeds - 2, 0.5, 0.79)):
        scores = simulate(truth, count, sweeps=3000)
        seen = holm(difference(scores[:, 1:], scores[:, :1]).p)[:, 0] <= 0.05
        assert low < seen.mean() < high, (seeds, seen.mean())
    few = seeds_needed(NOISE * np.sqrt(2))  # what an uncorrected test would need
    scores = simulate(truth, few, sweeps=3000)
    assert (
        np.mean(holm(difference(scores[:, 1:], scores[:, :1]).p)[:, 0] <= 0.05) < 0.75
    )


@pytest.mark.parametrize("sd", [0.0036, 0.009, 0.02])
def test_two_seeds_are_not_said_to_see_what_they_do_not(sd):
    """Where the difference is many sd, but the level asks for more."""
    seeds = seeds_needed(sd, 20)
    rng = np.random.default_rng(3)
    for count in (2, 3):
        p = difference(rng.normal(0.3, sd, (4000, count)), np.zeros(count)).p
        assert (np.mean(p <= 0.05 / 20) >= 0.8) == (seeds <= count), (sd, seeds)


def test_holm_steps_down():
    p = np.array([0.04, 0.01, np.nan, 0.03])
    np.testing.assert_allclose(holm(p), [0.06, 0.03, np.nan, 0.06])
    np.testing.assert_allclose(holm(p[None])[0], holm(p))
    assert holm(np.array([0.9, 0.8])).max() == 1


def test_too_little_to_tell_is_nan_not_a_number():
    one = difference([35.0], [34.0])
    assert one.mean == 1 and np.isnan([one.sd, one.low, one.high, one.p]).all()
    assert np.isnan(summary([35.0]).low) and summary([35.0]).mean == 35
    same = difference([2.1, 3.1, 4.1], [1.0, 2.0, 3.0])  # 1.1 each, but for rounding
    assert same.mean == pytest.approx(1.1) and np.isnan([same.p, same.low]).all()


def spoilt(sentences, every):
    return [
        " ".join("x" if i % every == 0 else w for i, w in enumerate(s.split(), n))
        for n, s in enumerate(sentences)
    ]


def test_the_bootstrap_is_sacrebleus():
    colours = ("red", "green", "blue", "old")
    references = [
        f"the {colours[i % 4]} dog number {i} runs over a field" for i in range(200)
    ]
    systems = {
        "baseline": spoilt(references, 6),
        "same": spoilt(references, 6),
        "worse": spoilt(references, 4),
    }
    found = paired_bootstrap(systems, references, samples=200)
    assert list(found) == list(systems) and found["baseline"].p is None
    assert found["same"].p > 0.5 and found["worse"].p < 0.05
    assert found["worse"].score < found["same"].score == found["baseline"].score
    assert 0 < found["baseline"].half_width < 5
    alone = paired_bootstrap({"baseline": systems["baseline"]}, references, 200)
    assert alone == {"baseline": found["baseline"]}


@pytest.mark.parametrize(
    "corrected, sentence",
    [
        (0.02, "Different from the baseline whole beyond chance .*: half by −45.00 ("),
        (0.2, "corrected for 1 arm. Without the correction these would: half by −45"),
    ],
)
def test_the_verdict_tells_what_only_the_correction_takes(corrected, sentence):
    whole, half = np.array([70.0, 72.0, 75.0]), np.array([25.0, 31.0, 26.0])
    arms = [SimpleNamespace(name=name, seeds=[0, 1, 2]) for name in ("whole", "half")]
    paired = difference(half, whole)
    assert paired.p < 0.05
    comparisons = [
        Comparison(arms[0], summary(whole), None, np.nan, None),
        Comparison(arms[1], summary(half), paired, corrected, None),
    ]
    report = SimpleNamespace(name="BLEU", baseline=arms[0], unfinished=0, arms=[])
    told = " ".join(verdict(report, comparisons))
    assert re.search(sentence.replace("(", r"\("), told), told


def report_of(metric="bleu", **arms):
    """A report of such scores; the first arm is the baseline."""
    told = [
        SimpleNamespace(
            name=name,
            is_baseline=i == 0,
            seeds=list(range(len(scores))),
            test={metric: np.array(scores, float)},
            dev={metric: np.array(scores, float)},
            published=None,
            lost=0,
        )
        for i, (name, scores) in enumerate(arms.items())
    ]
    fields = dict.fromkeys(Report._fields) | {"metric": metric, "arms": told}
    return Report(**(fields | {"unfinished": 0, "checkpoint": "best"}))


def test_arms_without_a_spread_are_not_counted_as_tested():
    report = report_of(whole=[3, 4, 6], alike=[3, 4, 6], half=[3, 5, 6], less=[2, 4, 5])
    comparisons = compare(report)
    told = " ".join(verdict(report, comparisons))
    assert "at 5 %, corrected for 2 arms" in told
    assert "Not tested, for want of a spread of the seeds' differences: alike." in told
    by_name = {c.arm.name: c for c in comparisons}
    assert np.isnan(by_name["alike"].p) and by_name["alike"].seeds_needed is None
    sd = np.std([0, 1, 0], ddof=1)
    assert by_name["half"].seeds_needed == seeds_needed(sd, 2) > seeds_needed(sd)
    assert f"{seeds_needed(sd, 2)} seeds an arm" in told
    assert "a rough estimate, from 3 seeds." in told
    legend = how_to_read_scores(report, comparisons)
    assert "at the level of 5 % / 2, which is what Holm asks" in legend


def test_arms_that_are_as_good_are_all_called_the_best():
    report = report_of(whole=[3, 4, 6], half=[4, 3, 6], less=[2, 4, 5])
    told = " ".join(verdict(report, compare(report)))
    assert "the highest mean test score is 4.33 (BLEU) with whole; half." in told


def test_seeds_that_are_all_alike_have_no_interval():
    report = report_of(whole=[99.9] * 3, half=[3, 5, 4])
    header, whole, half = scores_table(report, compare(report))
    assert header[4] == "95 % interval" and whole[3] == "99.90 ± 0.00"
    assert whole[4] == "–" and half[4] == "1.52 to 6.48"


def test_the_dev_column_is_of_dev():
    report = report_of(whole=[3, 4, 6], half=[3, 5, 6])
    report.arms[1].dev = {"bleu": np.array([10.0, 11.0, 12.0])}
    header, _, half = scores_table(report, compare(report))
    assert half[header.index("dev")] == "11.00"


def test_the_legend_says_where_nuisance_settings_were_not_searched():
    report = report_of(whole=[3, 4], half=[4, 4])
    for details, searched, told in (
        ("Scientific: a.", False, False),
        ("Nuisance: b.", False, True),
        ("Nuisance: b.", True, False),
    ):
        one = report._replace(details=details, searched=searched)
        legend = how_to_read_scores(one, compare(one))
        assert ("settings were not searched" in legend) == told


def test_what_is_told_of_seeds_is_of_those_in_common():
    """The baseline lost two, and has one that an arm lacks."""
    report = report_of(whole=[3, 4, 6], half=[3, 5, 6, 7, 9], less=[2, 3])
    report.arms[2].seeds = [1, 3]
    comparisons = compare(report)
    told = " ".join(verdict(report, comparisons))
    assert "a rough estimate, from 3 seeds." in told
    assert "differences are of those in common. half: 3; less: 1." in told
    assert comparisons[1].difference.mean == pytest.approx(1 / 3)
    assert comparisons[2].difference.mean == -2
    legend = how_to_read_scores(report, comparisons)
    assert "the same seeds" not in legend and legend.startswith("Mean ± sd: over seeds")
    even = report_of(whole=[3, 4, 6], half=[3, 5, 6])
    assert "in common" not in " ".join(verdict(even, compare(even)))
    legend = how_to_read_scores(even, compare(even))
    assert legend.startswith("Every arm is trained with the same seeds. Mean ± sd")


def test_arms_that_are_not_compared_are_told():
    for arms in ({}, {"half": []}, {"half": [5, 6]}):
        report = report_of(whole=[3, 4, 6], **arms)
        for arm in report.arms[1:]:
            arm.seeds = [seed + 7 for seed in arm.seeds]
        told = " ".join(verdict(report, compare(report)))
        assert "no other arm has a score for a seed of the baseline whole." in told
        assert "two seeds or more" not in told
        absent = "Not in the table, for want of a score: half." in told
        assert absent == (arms == {"half": []})
    report = report_of(whole=[3], half=[5])
    assert "two seeds or more whose" in " ".join(verdict(report, compare(report)))


def test_more_seeds_than_can_be_told_are_not_left_out():
    report = report_of(whole=[10, 20, 60], half=[10, 21, 60], wild=[90, 0, 10])
    comparisons = compare(report)
    assert "would need > 10,000 seeds an arm" in " ".join(verdict(report, comparisons))
    header, *rows = scores_table(report, comparisons)
    column = header.index("seeds to see 0.3 points of BLEU")
    assert [row[column] for row in rows][::2] == ["–", "> 10,000"]
    assert rows[1][column].isdigit()


@pytest.mark.parametrize(
    "metric, seen",
    [
        ("chrf", "0.3 points of chrF"),
        ("published_bleu", "0.3 points of published BLEU"),
        ("exact_match", "0.3 percentage points of exact matches"),
    ],
)
def test_the_difference_to_see_has_a_unit(metric, seen):
    report = report_of(metric, whole=[3, 4, 6], half=[3, 5, 6])
    comparisons = compare(report)
    assert f"true difference of {seen} would" in " ".join(verdict(report, comparisons))
    assert f"seeds to see {seen}" in scores_table(report, comparisons)[0]
    assert f"true difference of {seen} " in how_to_read_scores(report, comparisons)


@pytest.mark.parametrize("checkpoint", ["best", "last", "average"])
def test_the_legend_says_which_checkpoints_are_scored(checkpoint):
    report = report_of(whole=[3, 4])._replace(checkpoint=checkpoint)
    told = how_to_read_scores(report, compare(report))
    assert ("Checkpoints were chosen on dev" in told) == (checkpoint == "best")
    assert told.endswith(" test was decoded once, after that.")


@pytest.mark.parametrize("metric, name", [("bleu", "BLEU"), ("exact_match", "chrF")])
def test_the_legend_says_what_the_bootstraps_p_is_of(metric, name):
    told = how_to_read_others(report_of(metric, whole=[3, 4]))
    assert f"p (bootstrap): of no difference between the arm's {name} and" in told
    assert "not about the seeds, and not corrected by Holm" in told
