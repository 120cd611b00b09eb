"""What a report says about a sweep: comparisons with the baseline, verdict, tables.

All scores here are as they are shown: stored values times `Metric.scale`.
"""

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from headcount.analysis.formatting import (
    NOTHING,
    count,
    format_settings,
    interval,
    number,
    p_value,
    signed,
)
from headcount.analysis.significance import (
    LEVEL,
    MAX_SEEDS,
    Difference,
    Summary,
    difference,
    holm,
    seeds_needed,
    summary,
)
from headcount.tasks.base import LOSS, Metric


class Bootstrap(NamedTuple):
    """How one trained model's score depends on the choice of test examples."""

    half_width: float  # of the 95% interval
    p: float | None  # of no difference to the baseline; None: it is the baseline


class ArmResult(NamedTuple):
    """One arm, with its trials that finished, in the order of their seeds."""

    name: str
    is_baseline: bool
    value: float | None  # of the swept setting, if it is one number
    mlp_dim: int
    parameters: int
    flops: int
    seeds: list[int]
    test: dict[str, np.ndarray]  # by name of the metric, R
    dev: dict[str, np.ndarray]
    lost: int  # trials that diverged or failed
    nuisance: dict  # as chosen on dev, or as the ablation sets them
    seconds: float | None  # of training, per trial
    tokens_per_second: float | None  # of a group
    published: float | None
    bootstrap: Bootstrap | None
    # by name of the metric: steps, and dev scores during training, R steps
    curves: dict[str, tuple[np.ndarray, np.ndarray]]


class Example(NamedTuple):
    """A test example, and what two arms predicted."""

    text: dict[str, str]  # by field
    best: str
    worst: str


class Report(NamedTuple):
    """Everything that a report shows, read or computed."""

    title: str
    question: str
    details: str  # the rest of the ablation's docstring
    metrics: tuple[Metric, ...]  # of the task
    metric: Metric  # that arms are compared by
    curve_metric: Metric  # that is evaluated during training
    arms: list[ArmResult]
    axis: str | None  # what the arms' values are
    anchor: tuple[str, str] | None  # source and unit
    bootstrap_metric: Metric | None  # None: there is no bootstrap
    examples: list[Example]
    best: str  # the arm with the best mean
    worst: str
    environment: dict[str, str]
    command: str
    note: str | None
    checkpoint: str  # that is scored, a key of report_markdown.CHECKPOINTS
    has_search: bool  # whether nuisance settings were searched
    verdicts: list[dict]  # one per arm but the baseline; see `sweeps.looks`
    cost: str  # of the verdicts
    unfinished: int  # trials
    seed: int | None  # of bootstrap and examples; None: the first of each arm

    @property
    def baseline(self) -> ArmResult:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.is_baseline)

    @property
    def outcomes(self) -> list[Metric]:
        """The metrics with a table and a figure of their own: the loss comes first.

        It has far less noise over seeds. It is left out if an arm lacks it, as where
        arms have other tokens.
        """
        has_loss = all(LOSS.name in arm.test for arm in self.arms if arm.seeds)
        losses = [m for m in self.metrics if m.name == LOSS.name] if has_loss else []
        return [*losses, *[self.metric] * (self.metric not in losses)]


class Comparison(NamedTuple):
    """An arm beside the baseline, in one metric."""

    arm: ArmResult
    summary: Summary
    difference: Difference | None  # None: it is the baseline, or has no seed of it
    p: float  # corrected for the number of tested arms; NaN: not tested
    seeds_needed: float | None  # None: unknown; infinity: more than MAX_SEEDS


def compare(report: Report, metric: Metric) -> list[Comparison]:
    """Compare every arm that has scores with the baseline, paired by seed."""
    arms = [arm for arm in report.arms if arm.seeds]
    found = [difference_to_baseline(report, arm, metric) for arm in arms]
    p = holm([math.nan if paired is None else paired.p for paired in found])
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
        for arm, paired, corrected in zip(arms, found, p, strict=True)
    ]


def common_seeds(report: Report, arm: ArmResult) -> list[int]:
    """Return the seeds that an arm and the baseline both have."""
    return [seed for seed in arm.seeds if seed in report.baseline.seeds]


def difference_to_baseline(
    report: Report, arm: ArmResult, metric: Metric
) -> Difference | None:
    """Return an arm's difference to the baseline over the seeds that both have."""
    baseline = report.baseline
    known = dict(zip(baseline.seeds, baseline.test[metric.name], strict=True))
    pairs = [
        (score, known[seed])
        for seed, score in zip(arm.seeds, arm.test[metric.name], strict=True)
        if seed in known
    ]
    if arm.is_baseline or not pairs:
        return None
    return difference(*np.transpose(pairs))


def best_mean(metric: Metric, means: list[float]) -> float:
    """Return the best of some means."""
    return max(means) if metric.higher_is_better else min(means)


def with_unit(text: str, metric: Metric) -> str:
    """Append the unit of a metric to a heading that names it, if it adds anything."""
    is_clear = metric.unit in ("", "points")
    return text if is_clear else f"{text}, {metric.unit}"


def margin_text(metric: Metric, margin: float | None = None) -> str:
    """Return a margin, by default the metric's, with its unit: 0.3 points of BLEU."""
    margin = metric.margin if margin is None else margin
    unit = "percentage points" if metric.unit == "%" else metric.unit
    return " ".join(filter(None, [f"{margin:g}", unit, "of", metric.label]))


def format_seeds(needed: float | None) -> str:
    """Format a number of seeds from `seeds_needed`."""
    if needed is None:
        return NOTHING
    return f"> {MAX_SEEDS:,}" if math.isinf(needed) else str(needed)


def verdict(report: Report, comparisons: list[Comparison]) -> list[str]:
    """Return what the comparisons show, in a few sentences.

    Args:
        comparisons: by `report.metric`.
    """
    metric, baseline = report.metric, report.baseline.name
    best = best_mean(metric, [c.summary.mean for c in comparisons])
    label = with_unit(metric.label, metric)
    winners = [c.arm.name for c in comparisons if math.isclose(c.summary.mean, best)]
    trainings = sum(len(c.arm.seeds) for c in comparisons)
    sentences = [
        f"{count(trainings, 'training')} of {count(len(comparisons), 'arm')}. The best "
        f"mean test score is {number(best, metric.format)} ({label}), with "
        f"{'; '.join(winners)}."
    ]
    others = [c for c in comparisons if c.difference is not None]
    tested = [c for c in others if not math.isnan(c.p)]
    untested = [c.arm.name for c in others if math.isnan(c.p)]
    different = [c for c in others if c.p <= LEVEL]
    uncorrected = [c for c in others if c.difference.p <= LEVEL]
    level = f"at the {LEVEL:.0%} level, corrected for {count(len(tested), 'arm')}"
    if different:
        sentences.append(
            f"Significantly different from the baseline {baseline} {level}: "
            f"{differences_text(metric, different)}."
        )
    elif uncorrected:
        sentences.append(
            f"No arm differs significantly from the baseline {baseline} {level}. "
            f"Without the correction these would: "
            f"{differences_text(metric, uncorrected)}. So many comparisons need more "
            f"seeds."
        )
    elif tested:
        sentences.append(
            f"No arm differs significantly from the baseline {baseline} {level}: the "
            f"differences may be due to the seeds."
        )
    elif others:
        sentences.append(
            "Nothing can be tested: that needs at least two seeds whose scores differ."
        )
    else:
        sentences.append(
            f"Nothing can be compared: no other arm has a seed of the baseline "
            f"{baseline}."
        )
    if tested and untested:
        sentences.append(
            f"Not tested, because all seeds differ by the same amount or there is only "
            f"one: {'; '.join(untested)}."
        )
    paired = {c.arm.name: len(common_seeds(report, c.arm)) for c in comparisons}
    uneven = [c.arm.name for c in comparisons if c.arm.seeds != report.baseline.seeds]
    if uneven:
        counts = "; ".join(f"{name}: {paired[name]}" for name in uneven)
        sentences.append(
            f"Some arms lack seeds of the baseline; their differences are over the "
            f"common seeds ({counts})."
        )
    needed = [c.seeds_needed for c in others if c.seeds_needed is not None]
    if needed:
        fewest = min(paired[c.arm.name] for c in tested)
        sentences.append(
            f"Finding a true difference of {margin_text(metric)} with a power of 80% "
            f"would need {format_seeds(max(needed))} seeds per arm at the spread seen "
            f"here: a rough estimate, from {count(fewest, 'seed')}."
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


def verdicts_table(report: Report) -> list[list[str]]:
    """Return the table of verdicts; its first row is the header."""
    spec = report.metric.format
    header = ["arm", "verdict", "difference", "simultaneous interval", "seeds"]
    rows = [
        [
            row["arm"],
            row["verdict"],
            signed(row["difference"], spec),
            interval(row["low"], row["high"], spec, signed),
            str(row["seeds"]),
        ]
        for row in report.verdicts
    ]
    return [header, *rows]


def verdict_sentences(report: Report) -> list[str]:
    """Return a sentence per verdict: which arms are better, worse, and so on."""
    if not report.verdicts:
        return []
    margin, baseline = report.verdicts[0]["margin"], report.baseline.name
    within = "" if margin is None else f" within {margin_text(report.metric, margin)}"
    texts = {
        "better": f"Better than the baseline {baseline}: {{}}.",
        "worse": f"Worse than the baseline {baseline}: {{}}.",
        "equivalent": f"Equivalent to the baseline {baseline}{within}: {{}}.",
        "undecided": "Undecided: {}.",
    }
    found = []
    for kind, text in texts.items():
        names = [row["arm"] for row in report.verdicts if row["verdict"] == kind]
        found += [text.format("; ".join(names))] if names else []
    return found


def differences_text(metric: Metric, comparisons: list[Comparison]) -> str:
    """Return by how much arms differ from the baseline."""
    spec = metric.format
    return "; ".join(
        f"{c.arm.name} by {signed(c.difference.mean, spec)} "
        f"({interval(c.difference.low, c.difference.high, spec, signed)})"
        for c in comparisons
    )


def scores_table(
    report: Report, metric: Metric, comparisons: list[Comparison]
) -> list[list[str]]:
    """Return the table of an outcome; its first row is the header."""
    has_published = metric == report.metric and report.anchor is not None
    header = ["arm", "seeds", "dev", "test, mean ± sd", "95% interval", "difference"]
    header += ["95% interval", "p (Holm)"]
    header += [f"seeds to see {margin_text(metric)}"] if metric.margin else []
    header += ["published"] if has_published else []
    spec, rows = metric.format, []
    for c in comparisons:
        paired = c.difference
        has_spread = c.summary.sd > 1e-9 * (1 + abs(c.summary.mean))
        row = [
            c.arm.name,
            str(len(c.arm.seeds)),
            number(c.arm.dev[metric.name].mean(), spec),
            f"{number(c.summary.mean, spec)} ± {number(c.summary.sd, spec)}",
            # seeds that are all alike say no more than one
            interval(c.summary.low, c.summary.high, spec) if has_spread else NOTHING,
            "baseline" if c.arm.is_baseline else signed(paired and paired.mean, spec),
            interval(paired.low, paired.high, spec, signed) if paired else NOTHING,
            p_value(c.p),
        ]
        row += [format_seeds(c.seeds_needed)] if metric.margin else []
        row += [number(c.arm.published, ".1f")] if has_published else []
        rows.append(row)
    return [header, *rows]


def others_table(report: Report, comparisons: list[Comparison]) -> list[list[str]]:
    """Return the table of the other metrics and the bootstrap; [] if there are none."""
    metrics = [
        metric
        for metric in report.metrics
        if metric not in report.outcomes
        and all(metric.name in c.arm.test for c in comparisons)
        and any(c.arm.test[metric.name].any() for c in comparisons)  # not 0 everywhere
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
            found = arm.bootstrap
            row.append(number(found and found.half_width, bootstrap.format))
            row.append(p_value(found and found.p))
        rows.append(row)
    return rows


def costs_table(comparisons: list[Comparison]) -> list[list[str]]:
    """Return the table of the arms' size and cost, and of their nuisance settings."""
    has_nuisance = any(c.arm.nuisance for c in comparisons)
    header = ["arm", "parameters", "F", "multiply-adds per token", "seconds per trial"]
    rows = [[*header, "tokens/s", *(["nuisance settings"] if has_nuisance else [])]]
    for arm in (c.arm for c in comparisons):
        rows.append(
            [
                arm.name,
                f"{arm.parameters:,}",
                str(arm.mlp_dim),
                f"{arm.flops:,}",
                number(arm.seconds, ".1f"),
                number(arm.tokens_per_second, ",.0f"),
                *([format_settings(arm.nuisance)] if has_nuisance else []),
            ]
        )
    return rows
