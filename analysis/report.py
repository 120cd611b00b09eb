"""The results of a sweep: what its report says, computed, in words and tables."""

import math
from functools import partial
from typing import NamedTuple

import numpy as np

from headcount.analysis.formatting import (
    NOTHING,
    counted,
    number,
    probability,
    seeds_told,
    settings,
    signed,
    span,
)
from headcount.analysis.significance import (
    LEVEL,
    SEEN,
    Bootstrap,
    Difference,
    Summary,
    difference,
    holm,
    seeds_needed,
    summary,
)

NAMES = {
    "bleu": "BLEU",
    "chrf": "chrF",
    "published_bleu": "BLEU, published protocol",
    "published_chrf": "chrF, published protocol",
    "exact_match": "exact match, %",
}
UNITS = {  # of a difference, as the unit of SEEN
    "bleu": "points of BLEU",
    "chrf": "points of chrF",
    "published_bleu": "points of published BLEU",
    "published_chrf": "points of published chrF",
    "exact_match": "percentage points of exact matches",
}
LOSS = "loss"  # in nats a token of the references; lower is better


class ArmResult(NamedTuple):
    """One arm: its selected trials that ended well, in order of seeds."""

    name: str
    is_baseline: bool
    value: float | None  # of the swept setting, where it is one number
    mlp_dim: int
    parameters: int
    flops: int
    seeds: list[int]
    test: dict[str, np.ndarray]  # by score, R
    dev: dict[str, np.ndarray]
    lost: int  # trials that diverged or failed
    nuisance: dict  # as selected on dev, or as the ablation has them
    seconds: float | None  # of training, a trial
    tokens_per_second: float | None  # of a group
    published: float | None
    bootstrap: Bootstrap | None
    curve: tuple[np.ndarray, np.ndarray]  # steps; dev scores while training, R steps


class Example(NamedTuple):
    """A test sentence, and what two arms made of it."""

    source: str
    reference: str
    best: str
    worst: str


class Report(NamedTuple):
    """All that is told; everything in it is read or computed."""

    title: str
    question: str
    details: str  # the rest of the ablation's docstring
    metric: str
    arms: list[ArmResult]
    axis: str | None  # what the arms' values are of
    anchor: tuple[str, str] | None  # source and unit
    examples: list[Example]
    best: str  # the arm with the highest mean, whose translations are examples
    worst: str  # and the one with the lowest
    environment: dict[str, str]
    command: str
    note: str | None
    checkpoint: str  # that is scored, a key of CHECKPOINTS
    searched: bool  # whether nuisance settings were
    unfinished: int  # trials
    seed: int | None  # that all arms share, of the translations; None: each's first

    @property
    def baseline(self) -> ArmResult:
        """The arm that the others are compared with."""
        return next(arm for arm in self.arms if arm.is_baseline)

    @property
    def name(self) -> str:
        """The metric's name."""
        return NAMES[self.metric]

    @property
    def seen(self) -> str:
        """The difference that is not to be missed, with its unit."""
        return f"{SEEN} {UNITS[self.metric]}"

    @property
    def has_loss(self) -> bool:
        """Whether every arm's is known, and of the same tokens."""
        return all(LOSS in arm.test for arm in self.arms if arm.seeds)


def bootstrapped(metric: str) -> str:
    """The score of sacreBLEU that the test set is drawn anew for."""
    return "chrf" if metric in ("chrf", "published_chrf", "exact_match") else "bleu"


class Comparison(NamedTuple):
    """An arm beside the baseline."""

    arm: ArmResult
    summary: Summary
    difference: Difference | None  # None: it is the baseline
    p: float  # corrected for the number of arms that are tested; NaN: this one isn't
    seeds_needed: float | None  # None: unknown; infinity: too many to tell


def compare(report: Report) -> list[Comparison]:
    """The statistics of every arm that has scores, paired by the seeds in common."""
    metric = report.metric
    arms = [arm for arm in report.arms if arm.seeds]
    found = [to_baseline(report, arm, metric) for arm in arms]
    p = holm([math.nan if paired is None else paired.p for paired in found])
    tested = max(1, np.sum(~np.isnan(p)))
    return [
        Comparison(
            arm,
            summary(arm.test[metric]),
            paired,
            float(corrected),
            None if paired is None else seeds_needed(float(paired.sd), tested),
        )
        for arm, paired, corrected in zip(arms, found, p, strict=True)
    ]


def in_common(report: Report, arm: ArmResult) -> list[int]:
    """The seeds that an arm and the baseline both have: those of their difference."""
    return [seed for seed in arm.seeds if seed in report.baseline.seeds]


def to_baseline(report: Report, arm: ArmResult, metric: str) -> Difference | None:
    """An arm's difference to the baseline; None: it is that, or has no seed of it."""
    baseline = report.baseline
    known = dict(zip(baseline.seeds, baseline.test[metric], strict=True))
    pairs = [
        (score, known[seed])
        for seed, score in zip(arm.seeds, arm.test[metric], strict=True)
        if seed in known
    ]
    if arm.is_baseline or not pairs:
        return None
    return difference(*np.transpose(pairs))


def verdict(report: Report, comparisons: list[Comparison]) -> list[str]:
    """What the numbers say, in a few sentences."""
    highest = max(c.summary.mean for c in comparisons)
    best = [c.arm.name for c in comparisons if math.isclose(c.summary.mean, highest)]
    scored = sum(len(c.arm.seeds) for c in comparisons)
    sentences = [
        f"{scored} trainings, {len(comparisons)} arms; the highest mean test score is "
        f"{number(highest)} ({report.name}) with {'; '.join(best)}."
    ]
    others = [c for c in comparisons if c.difference is not None]
    differ = [c for c in others if c.p <= LEVEL]
    alone = [c for c in others if c.difference.p <= LEVEL]
    tested = [c for c in others if not math.isnan(c.p)]
    untested = [c.arm.name for c in others if math.isnan(c.p)]
    level = f"{LEVEL * 100:.0f} %, corrected for {counted(len(tested), 'arm')}"
    if differ:
        sentences.append(
            f"Different from the baseline {report.baseline.name} beyond chance at "
            f"{level}: {told(differ)}."
        )
    elif tested:
        sentences.append(
            f"No arm differs from the baseline {report.baseline.name} beyond chance at "
            f"{level}"
            + (
                f". Without the correction these would: {told(alone)}. So many "
                f"comparisons take more seeds than there are here."
                if alone
                else ": what differences there are may be the seeds'."
            )
        )
    elif others:
        sentences.append(
            "Nothing can be told from chance here: that takes two seeds or more whose "
            "scores differ."
        )
    else:
        sentences.append(
            f"Nothing is compared here: no other arm has a score for a seed of the "
            f"baseline {report.baseline.name}."
        )
    if tested and untested:
        sentences.append(
            f"Not tested, for want of a spread of the seeds' differences: "
            f"{', '.join(untested)}."
        )
    paired = {c.arm.name: len(in_common(report, c.arm)) for c in comparisons}
    uneven = [c.arm for c in comparisons if c.arm.seeds != report.baseline.seeds]
    if uneven:
        told_of = "; ".join(f"{arm.name}: {paired[arm.name]}" for arm in uneven)
        sentences.append(
            f"Not all arms have the baseline's seeds, and differences are of those in "
            f"common. {told_of}."
        )
    needed = [c.seeds_needed for c in others if c.seeds_needed is not None]
    if needed:
        fewest = min(paired[c.arm.name] for c in tested)
        sentences.append(
            f"At the spread seen here, a true difference of {report.seen} would need "
            f"{seeds_told(max(needed))} seeds an arm to be seen in four sweeps of "
            f"five, so corrected: a rough estimate, from {counted(fewest, 'seed')}."
        )
    if absent := [arm.name for arm in report.arms if not arm.seeds]:
        sentences.append(f"Not in the table, for want of a score: {'; '.join(absent)}.")
    if report.unfinished:
        sentences.append(
            f"{report.unfinished} trials are not done yet: this is a report on the way."
        )
    lost = sum(arm.lost for arm in report.arms)
    if lost:
        sentences.append(f"{lost} trials diverged or failed and are not in the table.")
    return sentences


def told(comparisons: list[Comparison]) -> str:
    """By how much arms differ from the baseline, in a sentence."""
    return "; ".join(
        f"{c.arm.name} by {signed(c.difference.mean)} "
        f"({span(c.difference.low, c.difference.high, signed)})"
        for c in comparisons
    )


def scores_table(report: Report, comparisons: list[Comparison]) -> list[list[str]]:
    """The main table, its header first."""
    has_anchor = any(c.arm.published is not None for c in comparisons)
    header = [
        "arm",
        "seeds",
        "dev",
        "test, mean ± sd",
        "95 % interval",
        "difference",
        "95 % interval",
        "p (Holm)",
        f"seeds to see {report.seen}",
        *(["published"] if has_anchor else []),
    ]
    rows = []
    for c in comparisons:
        paired, published = c.difference, c.arm.published
        rows.append(
            [
                c.arm.name,
                str(len(c.arm.seeds)),
                number(c.arm.dev[report.metric].mean()),
                f"{number(c.summary.mean)} ± {number(c.summary.sd)}",
                # seeds that are all alike know no more of the others than one does
                span(c.summary.low, c.summary.high)
                if c.summary.sd > 1e-9 * (1 + abs(c.summary.mean))
                else NOTHING,
                "baseline" if c.arm.is_baseline else signed(paired and paired.mean),
                span(paired.low, paired.high, signed) if paired else NOTHING,
                probability(c.p),
                seeds_told(c.seeds_needed),
                *([number(published, 1)] if has_anchor else []),
            ]
        )
    return [header, *rows]


def others_table(report: Report, comparisons: list[Comparison]) -> list[list[str]]:
    """The arms' other scores, the test set's own uncertainty, and the loss."""
    metrics = [
        name
        for name in NAMES
        if name != report.metric
        and all(name in c.arm.test for c in comparisons)
        and any(c.arm.test[name].any() for c in comparisons)  # BLEU of words alone is 0
    ]
    header = ["arm", *(NAMES[name] for name in metrics)]
    header += ["test set's ±", "p (bootstrap)"]
    header += ["loss", "difference", "95 % interval"] if report.has_loss else []
    rows = [header]
    for arm in (c.arm for c in comparisons):
        others = [summary(arm.test[name]) for name in metrics]
        rows.append(
            [
                arm.name,
                *(f"{number(o.mean)} ± {number(o.sd)}" for o in others),
                number(arm.bootstrap and arm.bootstrap.half_width),
                probability(arm.bootstrap and arm.bootstrap.p),
                *(loss_cells(report, arm) if report.has_loss else []),
            ]
        )
    return rows


def loss_cells(report: Report, arm: ArmResult) -> list[str]:
    """The mean loss of an arm, and its difference to the baseline with the interval."""
    exactly, change = partial(number, digits=4), partial(signed, digits=4)
    mean = exactly(summary(arm.test[LOSS]).mean)
    paired = to_baseline(report, arm, LOSS)
    if paired is None:
        return [mean, "baseline" if arm.is_baseline else NOTHING, NOTHING]
    return [mean, change(paired.mean), span(paired.low, paired.high, change)]


def costs_table(comparisons: list[Comparison]) -> list[list[str]]:
    """Size and cost of the arms, and the nuisance settings that they had."""
    tuned = any(c.arm.nuisance for c in comparisons)
    header = ["arm", "parameters", "F", "multiply-adds a token", "seconds a trial"]
    rows = [[*header, "tokens/s", *(["nuisance settings"] if tuned else [])]]
    for arm in (c.arm for c in comparisons):
        rows.append(
            [
                arm.name,
                f"{arm.parameters:,}",
                str(arm.mlp_dim),
                f"{arm.flops:,}",
                number(arm.seconds, 1),
                f"{arm.tokens_per_second or 0:,.0f}",
                *([settings(arm.nuisance)] if tuned else []),
            ]
        )
    return rows
