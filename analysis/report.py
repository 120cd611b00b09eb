"""The content of a sweep's report: comparisons with the baseline, summary, tables.

All scores here are scaled for display: stored values times `Metric.scale`.
"""

import math
import re
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy

from headcount.analysis.anchors import Anchor
from headcount.analysis.formatting import (
    NOTHING,
    count,
    format_settings,
    interval,
    number,
    p_value,
    signed,
)
from headcount.analysis.sequential import FUTILITY, VERDICTS
from headcount.analysis.significance import (
    LEVEL,
    MAX_SEEDS,
    POWER,
    Difference,
    Summary,
    difference,
    holm,
    seeds_needed,
    summary,
)
from headcount.analysis.trends import Trend, fit_trend
from headcount.tasks.base import LOSS, Metric

UNEVEN = 3  # true ratio of standard deviations above which a verdict is doubtful


class Bootstrap(NamedTuple):
    """The variation of one trained model's score over resampled test examples."""

    half_width: float  # of the 95% interval
    p: float | None  # for no difference from the baseline; None: this is the baseline


class ArmResult(NamedTuple):
    """An arm with its R finished trials, in the order of their seeds."""

    name: str
    is_baseline: bool
    value: float | None  # of the swept setting, if it is one number
    mlp_dim: int
    parameters: int
    flops: int
    seeds: list[int]
    test: dict[str, np.ndarray]  # by metric name, of shape R
    dev: dict[str, np.ndarray]
    lost: int  # trials that diverged or failed
    nuisance: dict  # as chosen on dev, or as set by the ablation
    seconds: float | None  # of training, per trial
    tokens_per_second: float | None  # of a group
    published: dict[str, float]  # by source
    bootstrap: Bootstrap | None
    # by metric name: steps, and dev scores during training, of shape R x steps
    curves: dict[str, tuple[np.ndarray, np.ndarray]]
    claim: str | None = None  # by its authors; see configs/variants.py
    open_heads: list[int] = []  # by seed, if gates are learned
    # by statistic: steps, and means over heads, of shape R x steps; empty: not logged
    heads: dict[str, tuple[np.ndarray, np.ndarray]] = {}


class Example(NamedTuple):
    """A test example with the predictions of two arms."""

    text: dict[str, str]  # by field
    best: str
    worst: str


class Report(NamedTuple):
    """Everything that a report shows, read or computed."""

    title: str
    question: str
    details: str  # the rest of the ablation's docstring
    metrics: tuple[Metric, ...]  # of the task
    metric: Metric  # for comparing arms
    curve_metric: Metric  # for learning curves
    arms: list[ArmResult]
    axis: str | None  # label of the arms' values
    anchors: list[Anchor]  # published tables with a score of any arm
    bootstrap_metric: Metric | None  # None: there is no bootstrap
    examples: list[Example]
    best: str  # the arm with the best mean
    worst: str
    environment: dict[str, str]
    command: str
    note: str | None
    checkpoint: str  # the scored checkpoint, a key of report_markdown.CHECKPOINTS
    has_search: bool  # whether nuisance settings were searched
    verdicts: list[dict]  # for each arm but the baseline; see `sweeps.looks`
    cost: str  # of the verdicts, as a sentence
    unfinished: int  # number of unfinished trials
    seed: int | None  # of bootstrap and examples; None: the first of each arm
    heads: list[tuple] = []  # what heads.py measured; see `analysis.tables.arm_tables`
    earlier_seeds: list[int] = []  # numbers of seeds before some were added, unplanned

    @property
    def baseline(self) -> ArmResult:
        """The arm with which the others are compared."""
        return next(arm for arm in self.arms if arm.is_baseline)

    @property
    def is_planned(self) -> bool:
        """Whether seeds were added in stages, by planned looks."""
        return not self.earlier_seeds and any(row["looks"] for row in self.verdicts)

    @property
    def outcomes(self) -> list[Metric]:
        """The metrics with their own table: loss, `metric` and the task's first.

        The loss comes first because it varies far less over seeds. Metrics that an arm
        lacks are left out; the loss, for example, if the arms have different tokens.
        """
        losses = [metric for metric in self.metrics if metric.name == LOSS.name]
        chosen = dict.fromkeys([*losses, self.metric, self.metrics[0]])
        arms = [arm for arm in self.arms if arm.seeds]
        scores = [side for arm in arms for side in (arm.dev, arm.test)]
        return [m for m in chosen if all(m.name in side for side in scores)]


class Comparison(NamedTuple):
    """The comparison of an arm with the baseline in one metric."""

    arm: ArmResult
    summary: Summary
    difference: Difference | None  # None: the baseline itself, or no common seed
    p: float  # corrected for the number of tested arms; NaN: not tested
    seeds_needed: float | None  # None: unknown; infinity: more than MAX_SEEDS


def compare(report: Report, metric: Metric) -> list[Comparison]:
    """Compare every arm that has scores with the baseline, paired by seed."""
    arms = [arm for arm in report.arms if arm.seeds]
    differences = [difference_to_baseline(report, arm, metric) for arm in arms]
    # the remaining seeds of an arm that lost trials are a biased sample
    p = holm(
        [
            math.nan if paired is None or arm.lost or report.baseline.lost else paired.p
            for arm, paired in zip(arms, differences, strict=True)
        ]
    )
    tested = max(1, np.sum(~np.isnan(p)))
    return [
        Comparison(
            arm,
            summary(arm.test[metric.name]),
            paired,
            float(corrected),
            None
            if paired is None or metric.margin is None
            else seeds_needed(float(paired.sd), metric.margin, tested),
        )
        for arm, paired, corrected in zip(arms, differences, p, strict=True)
    ]


def difference_to_baseline(
    report: Report, arm: ArmResult, metric: Metric
) -> Difference | None:
    """Return an arm's difference from the baseline over their common seeds."""
    pairs = paired_scores(report, arm, metric, "test")
    return None if arm.is_baseline or not pairs.size else difference(*pairs)


def paired_scores(
    report: Report, arm: ArmResult, metric: Metric, side: str
) -> np.ndarray:
    """Return an arm's and the baseline's scores, of shape 2 R, for common seeds R.

    Args:
        side: "dev" or "test".
    """
    arm_scores, base = (
        dict(zip(of.seeds, getattr(of, side)[metric.name], strict=True))
        for of in (arm, report.baseline)
    )
    common = [seed for seed in arm.seeds if seed in base]
    return np.array([[of[seed] for seed in common] for of in (arm_scores, base)])


def loss_trend(report: Report) -> Trend | None:
    """Fit the test loss against the swept number, over the seeds that all arms share.

    Return None if the arms are not numeric or too few, or if the loss is not among the
    outcomes.
    """
    arms = [arm for arm in report.arms if arm.seeds]
    if report.axis is None or LOSS.name not in {m.name for m in report.outcomes}:
        return None
    seeds = sorted(set.intersection(*(set(arm.seeds) for arm in arms)))
    scores = [
        [arm.test[LOSS.name][arm.seeds.index(seed)] for seed in seeds] for arm in arms
    ]
    return fit_trend(np.array([arm.value for arm in arms]), np.array(scores))


def trend_text(report: Report) -> str | None:
    """Describe the fitted curve, its intervals, and the arms' distance from it."""
    trend = loss_trend(report)
    if trend is None:
        return None
    if not trend.fits:
        residual = number(trend.residual, LOSS.format)
        return (
            f"The loss does not follow a curve a·n^b + c, n = {report.axis}: the best "
            f"one misses arms' means by up to {residual}, and the 95% interval of at "
            f"least one."
        )
    if not trend.is_determined:
        return (
            f"Curve of the loss against n = {report.axis}: a·n^b + c, whose exponent "
            f"is not determined by these arms."
        )
    parts = ", ".join(
        f"{name} = {number(value, '.3g')} ({interval(low, high, '.3g')})"
        for name, (value, low, high) in zip("abc", trend[:3], strict=True)
    )
    return (
        f"Curve of the loss against n = {report.axis}: a·n^b + c with {parts}; "
        f"intervals: 95%, by a bootstrap over seeds. The arms' means lie within "
        f"{number(trend.residual, LOSS.format)} of it, inside their intervals."
    )


def paired_means(comparisons: list[Comparison]) -> dict[str, float]:
    """Return the baseline's mean, plus each arm's mean difference from it by seed.

    If all arms have the same seeds, these are their means. Otherwise means would differ
    by the seeds. Arms without a seed of the baseline are left out.
    """
    base = next(c for c in comparisons if c.arm.is_baseline).summary.mean
    return {
        c.arm.name: base if c.arm.is_baseline else base + c.difference.mean
        for c in comparisons
        if c.arm.is_baseline or c.difference is not None
    }


# appended if the best arm's seeds differ from the baseline's
PAIRED = " (the baseline's mean plus the mean difference from it by seed)"


def with_unit(text: str, metric: Metric) -> str:
    """Append a metric's unit to a heading, unless it is empty or just "points"."""
    is_clear = metric.unit in ("", "points")
    return text if is_clear else f"{text}, {metric.unit}"


def margin_text(metric: Metric, margin: float | None = None) -> str:
    """Format a margin (default: the metric's) with its unit: 0.3 points of BLEU."""
    margin = metric.margin if margin is None else margin
    unit = metric.unit.replace("%", "percentage points")
    if margin == 1:
        unit = re.sub(r"s\b", "", unit, count=1)  # 1 point, 1 nat per token
    return " ".join(filter(None, [f"{margin:g}", unit, "of", metric.label]))


def format_seeds(needed: float | None) -> str:
    """Format a number of seeds from `seeds_needed`."""
    if needed is None:
        return NOTHING
    return f"> {MAX_SEEDS:,}" if math.isinf(needed) else str(needed)


def summary_sentences(report: Report, comparisons: list[Comparison]) -> list[str]:
    """Summarize the comparisons in a few sentences.

    Args:
        comparisons: all arms, compared by `report.metric`.
    """
    metric, baseline = report.metric, report.baseline.name
    means = paired_means(comparisons)
    best = (max if metric.higher_is_better else min)(means.values())
    label = with_unit(metric.label, metric)
    winners = [name for name, mean in means.items() if math.isclose(mean, best)]
    first = next(c for c in comparisons if c.arm.name == winners[0])
    runs = sum(len(c.arm.seeds) for c in comparisons)
    base = next(c for c in comparisons if c.arm.is_baseline)
    pairing_note = "" if set(first.arm.seeds) == set(base.arm.seeds) else PAIRED
    sentences = [
        f"{count(runs, 'training run')} of {count(len(comparisons), 'arm')}. The best "
        f"mean test score is {number(best, metric.format)} ({label}), with "
        f"{'; '.join(winners)}{pairing_note}."
    ]
    compared = [c for c in comparisons if c.difference is not None]
    tested = [c for c in compared if not math.isnan(c.p)]
    untested = [c.arm.name for c in compared if math.isnan(c.p)]
    kinds = [row["verdict"] for row in report.verdicts]
    if tested or report.is_planned:
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in VERDICTS)
        side = "dev, after planned looks" if report.is_planned else "test"
        sentences.append(f"Verdicts on the other arms, on {side}: {counts}.")
        sentences += spread_warning(report) + text_warning(report)
        sentences += added_seeds_warning(report)
    elif compared:
        sentences.append(
            "No arm can be tested: a test needs at least two seeds whose differences "
            "to the baseline are not equal, and no trial that diverged or failed."
        )
        scores = [score for c in comparisons for score in c.arm.test[metric.name]]
        if metric.higher_is_better and not any(scores):
            sentences.append(
                "Every seed scored 0: train longer, or compare by --metric=loss."
            )
    else:
        sentences.append(
            f"Nothing can be compared: no other arm has a seed of the baseline "
            f"{baseline}."
        )
    if tested and untested and not report.is_planned:
        sentences.append(
            f"Not tested, because trials were lost, there is only one common seed, or "
            f"the difference is the same for all seeds: {'; '.join(untested)}."
        )
    baseline_seeds = set(report.baseline.seeds)
    paired = {
        c.arm.name: len(baseline_seeds.intersection(c.arm.seeds)) for c in comparisons
    }
    uneven = [c.arm.name for c in comparisons if c.arm.seeds != report.baseline.seeds]
    if uneven:
        counts = "; ".join(f"{name}: {paired[name]}" for name in uneven)
        sentences.append(
            f"Some arms lack seeds of the baseline; their differences are over the "
            f"common seeds ({counts})."
        )
    needed, names = seeds_by_outcome(report), [c.arm.name for c in compared]
    if needed:
        fewest = min(seeds for seeds in map(paired.get, names) if seeds > 1)
        texts = [
            f"a true difference of {margin} would need {number} seeds per arm"
            for margin, number in needed.items()
        ]
        sentences.append(
            f"With a power of {POWER:.0%}, finding {'; finding '.join(texts)}, at the "
            f"spread seen here: a rough estimate, from {count(fewest, 'seed')}."
        )
    if missing := [arm.name for arm in report.arms if not arm.seeds]:
        sentences.append(f"Without a score: {'; '.join(missing)}.")
    if report.unfinished:
        sentences.append(
            f"This report is preliminary: {count(report.unfinished, 'trial')} "
            f"{'is' if report.unfinished == 1 else 'are'} not done yet."
        )
    if lost := sum(arm.lost for arm in report.arms):
        sentences.append(f"{count(lost, 'trial')} diverged or failed.")
    return sentences


def spread_warning(report: Report) -> list[str]:
    """Return a sentence on arms whose spread over seeds is unlike the baseline's.

    The verdicts' error rate assumes that differences are roughly normal. They are not
    if some seeds of one arm fail to learn, for example, and none of the other's. An arm
    is named if the spreads differ by more than `UNEVEN`, and by more than an F test
    (which ignores the pairing, and so errs on the side of silence) puts down to chance.
    """
    side = "dev" if report.is_planned else "test"  # on which verdicts are based
    spreads = {
        arm.name: getattr(arm, side)[report.metric.name].std(ddof=1)
        for arm in report.arms
        if len(arm.seeds) > 1
    }
    sd = spreads.get(report.baseline.name)
    if sd is None:
        return []
    free = {arm.name: len(arm.seeds) - 1 for arm in report.arms}
    base, level = free[report.baseline.name], LEVEL / max(1, len(spreads) - 1)
    uneven = []
    for name, arm_sd in spreads.items():
        above, below = (
            scipy.stats.f.isf(level / 2, *of) ** 0.5
            for of in ((free[name], base), (base, free[name]))
        )
        if arm_sd > sd * max(UNEVEN, above) or arm_sd < sd / max(UNEVEN, below):
            uneven.append(name)
    if not uneven:
        return []
    return [
        f"The spread over seeds differs from the baseline's by a factor of more than "
        f"{UNEVEN}: {'; '.join(uneven)}. Wrong verdicts on such arms can be far more "
        f"frequent than {LEVEL:.0%}; look at every seed in the figure."
    ]


def text_warning(report: Report) -> list[str]:
    """Return a sentence on arms whose difference from the baseline depends on the text.

    All seeds are scored on the same texts, so intervals over seeds don't cover the
    choice of texts. An arm is named if its differences on dev and on test are apart by
    more than the margin, and by more than the seeds explain (a paired t-test, Holm's
    correction over arms).
    """
    metric, names, pairs = report.metric, [], []
    for arm in report.arms:
        if not arm.seeds:
            continue
        dev, test = (paired_scores(report, arm, metric, x) for x in ("dev", "test"))
        if not arm.is_baseline and dev.size:
            names.append(arm.name)
            pairs.append((dev[0] - dev[1], test[0] - test[1]))
    p = holm([difference(*sides).p for sides in pairs])
    apart = {
        name: [side.mean() for side in sides]
        for name, sides, corrected in zip(names, pairs, p, strict=True)
        if corrected <= LEVEL and abs(np.subtract(*sides).mean()) > (metric.margin or 0)
    }
    if not apart:
        return []
    largest = sorted(apart, key=lambda name: -abs(np.subtract(*apart[name])))[:3]
    shown = [
        f"{name} ({' and '.join(signed(x, metric.format) for x in apart[name])})"
        for name in largest
    ]
    omitted = f"; and {len(apart) - 3} more" if len(apart) > 3 else ""
    return [
        f"The difference from the baseline depends on the text: dev and test differ by "
        f"more than seeds explain, for {'; '.join(shown)}{omitted}. Intervals are "
        f"about seeds, so expect changes of this size on other texts."
    ]


def added_seeds_warning(report: Report) -> list[str]:
    """Return a sentence on seeds that were added without planned looks."""
    if not report.earlier_seeds:
        return []
    numbers = ", then ".join(map(str, report.earlier_seeds))
    return [
        f"The sweep was started with {numbers} seeds, and more were added later. The "
        f"verdicts' intervals are as wide as if looks at these numbers had been "
        f"planned, but other intervals and p-values are not. If a result was the "
        f"reason to add seeds, none of them hold strictly; --seeds=FIRST:LAST plans "
        f"looks."
    ]


def seeds_by_outcome(report: Report) -> dict[str, str]:
    """Return the number of seeds needed to detect each outcome's margin, as text.

    This is the number for the arm that needs the most. Outcomes without a margin or a
    spread are left out.
    """
    texts = {}
    for metric in report.outcomes:
        needed = [c.seeds_needed for c in compare(report, metric)]
        needed = [seeds for seeds in needed if seeds is not None]
        if needed:
            texts[margin_text(metric)] = format_seeds(max(needed))
    return texts


VERDICTS_HEADER = ["arm", "verdict", "difference", "simultaneous interval", "seeds"]


def verdict_cells(report: Report, row: dict) -> list[str]:
    """Return a row of a table of verdicts."""
    spec = report.metric.format
    return [
        row["arm"],
        row["verdict"],
        signed(row["difference"], spec),
        interval(row["low"], row["high"], spec, signed),
        str(row["seeds"]),
    ]


def verdict_sentence(row: dict, metric: Metric, baseline: str) -> str:
    """Format one arm's verdict as a sentence.

    Args:
        row: a row of the table of verdicts (see `sweeps.looks`), scaled for display.
    """
    spec, seeds = metric.format, count(row["seeds"], "seed")
    value = with_unit(metric.label, metric)
    by = f"{signed(row['difference'], spec)} ({value}; {after(row, spec, seeds)})"
    arm, kind, margin = row["arm"], row["verdict"], row["margin"]
    if kind == "equivalent":
        within, mean = margin_text(metric, margin), signed(row["difference"], spec)
        bound = number(row["bound"], spec)
        return (
            f"{arm} is equivalent to {baseline} within {within}: {mean} ({value}; at "
            f"most {bound} either way by two one-sided tests, after {seeds})."
        )
    if kind == "undecided":
        if row["lost"]:
            lost = count(row["lost"], "trial")
            return f"{arm} is undecided: {lost} of it or {baseline} diverged or failed."
        if not row["seeds"]:
            return f"{arm} is undecided: it has no seed in common with {baseline}."
        chance = row["chance"]
        ended = chance is not None and chance < FUTILITY
        note = f" More seeds are unlikely to decide it ({chance:.0%})." if ended else ""
        return f"{arm} is undecided against {baseline}: {by}.{note}"
    small = margin is not None and max(abs(row["low"]), abs(row["high"])) < margin
    note = f", by less than the margin of {margin_text(metric, margin)}" * small
    return f"{arm} is {kind} than {baseline}{note}: {by}."


def after(row: dict, spec: str, seeds: str) -> str:
    """Format a verdict's interval, and the number of seeds it took."""
    if math.isnan(row["low"]):
        return f"after {seeds}, too few or too alike for an interval"
    return f"{interval(row['low'], row['high'], spec, signed)}, after {seeds}"


def scores_table(
    report: Report, metric: Metric, comparisons: list[Comparison]
) -> list[list[str]]:
    """Return the table of an outcome; its first row is the header."""
    anchors = report.anchors if metric == report.metric else []
    header = ["arm", "seeds", "dev", "test, mean ± sd", "95% interval", "difference"]
    header += ["95% interval", *["p (Holm)"] * (not report.is_planned)]
    verdicts = {}
    if metric == report.metric:
        verdicts = {row["arm"]: row["verdict"] for row in report.verdicts}
    header += ["verdict"] if verdicts else []
    header += [f"seeds to see {margin_text(metric)}"] if metric.margin else []
    for anchor in anchors:  # in a unit of their own, which need not be the metric's
        source = f", {anchor.source.split(',')[0]}" if len(anchors) > 1 else ""
        header.append(f"published{source} ({anchor.unit.split(',')[0]})")
    has_claims = any(c.arm.claim for c in comparisons)
    header += ["claimed by its authors"] if has_claims else []
    spec, rows = metric.format, []
    for c in comparisons:
        paired = c.difference
        has_spread = c.summary.sd > 1e-9 * (1 + abs(c.summary.mean))
        within = metric.clip(c.summary.low, c.summary.high)
        row = [
            c.arm.name,
            str(len(c.arm.seeds)),
            number(c.arm.dev[metric.name].mean(), spec),
            f"{number(c.summary.mean, spec)} ± {number(c.summary.sd, spec)}",
            # identical scores for all seeds carry no more information than one seed
            interval(*within, spec) if has_spread else NOTHING,
            "baseline" if c.arm.is_baseline else signed(paired and paired.mean, spec),
            interval(paired.low, paired.high, spec, signed) if paired else NOTHING,
            *[p_value(c.p)] * (not report.is_planned),
        ]
        row += [verdicts.get(c.arm.name, NOTHING)] if verdicts else []
        row += [format_seeds(c.seeds_needed)] if metric.margin else []
        row += [number(c.arm.published.get(a.source), a.format) for a in anchors]
        row += [c.arm.claim or NOTHING] if has_claims else []
        rows.append(row)
    return [header, *rows]


def others_table(report: Report, comparisons: list[Comparison]) -> list[list[str]]:
    """Return the table of the other metrics and the bootstrap; [] if there are none."""
    metrics = [
        metric
        for metric in report.metrics
        if metric not in report.outcomes
        and all(metric.name in c.arm.test for c in comparisons)
        and any(c.arm.test[metric.name].any() for c in comparisons)  # not all 0
    ]
    bootstrap = report.bootstrap_metric
    if not metrics and bootstrap is None:
        return []
    header = ["arm", *(with_unit(m.label, m) for m in metrics)]
    header += ["test set's ±", "p (bootstrap)"] if bootstrap else []
    rows = [header]
    for arm in (c.arm for c in comparisons):
        row = [arm.name]
        for metric in metrics:
            form = partial(number, spec=metric.format)
            mean, sd, *_ = summary(arm.test[metric.name])
            row.append(f"{form(mean)} ± {form(sd)}")
        if bootstrap:
            resampled = arm.bootstrap
            row.append(number(resampled and resampled.half_width, bootstrap.format))
            row.append(p_value(resampled and resampled.p))
        rows.append(row)
    return rows


def costs_table(comparisons: list[Comparison]) -> list[list[str]]:
    """Return the table of the arms' sizes, costs and nuisance settings."""
    has_nuisance = any(c.arm.nuisance for c in comparisons)
    has_gates = any(c.arm.open_heads for c in comparisons)
    header = ["arm", "parameters", "F", "multiply-adds per token", "seconds per trial"]
    header += ["tokens/s", *["heads left"] * has_gates]
    rows = [[*header, *(["nuisance settings"] if has_nuisance else [])]]
    for arm in (c.arm for c in comparisons):
        rows.append(
            [
                arm.name,
                f"{arm.parameters:,}",
                str(arm.mlp_dim),
                f"{arm.flops:,}",
                number(arm.seconds, ".1f"),
                number(arm.tokens_per_second, ",.0f"),
                *[heads_left(arm)] * has_gates,
                *([format_settings(arm.nuisance)] if has_nuisance else []),
            ]
        )
    return rows


def heads_left(arm: ArmResult) -> str:
    """Format the number of heads that learned gates left open: mean ± sd over seeds."""
    if not arm.open_heads:
        return NOTHING
    mean, sd, *_ = summary(arm.open_heads)
    return f"{number(mean, '.1f')} ± {number(sd, '.1f')}"
