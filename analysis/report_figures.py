"""Matplotlib figures of a report, saved as PNG, and as SVG for an HTML page.

An arm has the same colour in all figures. Figures are as wide as a phone, so that their
text is readable there.
"""

import io
import re

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator, NullLocator

from headcount.analysis.report import (
    ArmResult,
    Comparison,
    Report,
    compare,
    loss_trend,
    with_unit,
)
from headcount.analysis.report_markdown import curve_metrics
from headcount.analysis.significance import MIN_SEEDS, summary
from headcount.tasks.base import LOSS, Metric

matplotlib.use("agg")

WIDTH = 4.8  # inches: about 345 pixels
INK, MUTED, GRID = "#1c1d21", "#6a6d75", "#dfe1e6"
# In an SVG, these become CSS variables, which the page redefines in dark mode.
THEME = {INK: "ink", MUTED: "muted", GRID: "grid"}
COLOURS = (
    *("#2f6fca", "#1f9e89", "#7da32c", "#d19a1a", "#dd6e3b", "#c2456b"),
    *("#8b5fbf", "#5b7f95", "#a0785a", "#4aa3d8", "#b0569e", "#6f8f3f"),
)
LINES, MARKERS = ("-", (0, (4, 1.5)), (0, (1, 1)), "-."), "osD^"
DIRECT = 30  # total length of arm names up to which points are labelled directly
HEAD_STATISTICS = {  # names in metrics.jsonl (with train.log_heads), and titles
    "entropy": "entropy, nats",
    "distance": "distance, tokens",
    "sink": "weight on the sink",
    "largest_logit": "largest logit",
}
RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.titlesize": 9,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "legend.labelcolor": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",  # keep text as text
    "svg.hashsalt": "headcount",  # make ids reproducible
}


def make_figures(report: Report) -> dict[str, tuple]:
    """Return the report's figures and their captions, by name."""
    draw_scores = scores_by_value if report.axis else scores_by_arm
    with plt.rc_context(RC):
        figures = {
            f"test_{metric.name}": draw_scores(report, metric)
            for metric in report.outcomes
        }
        for metric in curve_metrics(report):
            figures[f"dev_{metric.name}"] = learning_curves(report, metric)
        figures["heads"] = head_curves(report)
        figures["heads_left"] = scores_by_heads(report)
        figures["costs"] = costs(report)
    return {name: figure for name, figure in figures.items() if figure is not None}


def arm_styles(arms: list[ArmResult]) -> dict[str, tuple]:
    """Return a colour, a line style and a marker for every arm, by name.

    Arms whose names are equal up to the first comma, such as "mean" and "mean, equal
    parameters", share a colour. The baseline has the colour of the text.
    """
    families = {arm.name: arm.name.split(", ")[0] for arm in arms}
    neutral = {families[arm.name] for arm in arms if arm.is_baseline}
    coloured = dict.fromkeys(f for f in families.values() if f not in neutral)
    colours = {family: COLOURS[i % len(COLOURS)] for i, family in enumerate(coloured)}
    styles, used = {}, []
    for name, family in families.items():
        colour = colours.get(family, INK)
        turn = used.count(colour)
        used.append(colour)
        styles[name] = colour, LINES[turn % len(LINES)], MARKERS[turn % len(MARKERS)]
    return styles


def draw_interval(
    ax, at, comparison: Comparison, metric: Metric, styles, vertical=True, **style
) -> None:
    """Draw an arm's mean with its interval, clipped to the metric's range.

    With fewer than three seeds, the interval is too wide to be useful and is left out.
    """
    value, (colour, _, marker) = comparison.summary.mean, styles[comparison.arm.name]
    style = {"ms": 5.5, "elinewidth": 1.2, "color": colour, "fmt": marker} | style
    low, high = metric.clip(comparison.summary.low, comparison.summary.high)
    # a perfect BLEU is 100.00000000000004, which is above the metric's range
    bar = np.maximum([[value - low], [high - value]], 0)
    has_interval = len(comparison.arm.seeds) >= MIN_SEEDS and np.isfinite(low)
    ax.errorbar(
        *(([at], [value]) if vertical else ([value], [at])),
        **({"yerr" if vertical else "xerr": bar} if has_interval else {}),
        mec="none",
        capsize=0,
        **style,
    )


def draw_arm(ax, at, comparison, metric, styles, vertical: bool, width: float) -> None:
    """Draw an arm's seeds as dots and, if at least three, their mean and interval."""
    scores = comparison.arm.test[metric.name]
    colour, _, marker = styles[comparison.arm.name]
    has_mean = len(scores) >= MIN_SEEDS
    offsets = at + np.linspace(-width, width, len(scores)) if len(scores) > 1 else [at]
    ax.scatter(
        *((offsets, scores) if vertical else (scores, offsets)),
        s=14 if has_mean else 24,
        marker=marker,
        color=colour,
        alpha=0.45 if has_mean else 0.9,
        linewidths=0,
        zorder=3,
    )
    if has_mean:
        style = {"ms": 6.5, "elinewidth": 1.6, "zorder": 4}
        draw_interval(ax, at, comparison, metric, styles, vertical, **style)


def scores_caption(metric: Metric, comparisons: list[Comparison]) -> str:
    """Return the caption of a figure of scores."""
    dots = "Every seed is a dot"
    if any(len(c.arm.seeds) >= MIN_SEEDS for c in comparisons):
        dots = "The mean with its 95% interval, and every seed as a dot"
    return f"Test {metric.label} per arm. {dots}; the line is the baseline's mean."


def scores_by_value(report: Report, metric: Metric):
    """Plot scores against the swept number, with published scores below."""
    comparisons = sorted(compare(report, metric), key=lambda c: c.arm.value)
    values = [c.arm.value for c in comparisons]
    anchors = report.anchors if metric == report.metric else []
    rows = 1 + len(anchors)
    figure, axes = plt.subplots(
        rows,
        1,
        figsize=(WIDTH, 3.0 + 1.4 * len(anchors)),
        height_ratios=[2.4, *[1] * len(anchors)],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    ax, styles = axes[0, 0], arm_styles(report.arms)
    for i, comparison in enumerate(comparisons):
        draw_arm(ax, i, comparison, metric, styles, vertical=True, width=0.06)
    baseline_line(ax.axhline, report, metric)
    ax.set_title(with_unit(f"Test {metric.label}", metric))
    caption = scores_caption(metric, comparisons)
    trend = loss_trend(report) if metric.name == LOSS.name else None
    if trend is not None and trend.is_drawn:
        at = np.linspace(0, len(values) - 1, 100)
        numbers = np.exp(np.interp(at, range(len(values)), np.log(values)))
        curve, low, high = trend.at(numbers)
        ax.plot(at, curve, color=MUTED, lw=1.0, zorder=2)
        ax.fill_between(at, low, high, color=MUTED, alpha=0.15, lw=0, zorder=0)
        caption += " The curve is a·n^b + c with its 95% interval."
    for below, (_, _, source, unit, *_) in zip(axes[1:, 0], anchors, strict=True):
        scores = [c.arm.published.get(source) for c in comparisons]
        points = [(i, score) for i, score in enumerate(scores) if score is not None]
        below.plot(*zip(*points, strict=True), "D-", color=MUTED, mfc="none", lw=0.8)
        below.margins(y=0.25)
        below.set_title(f"Published: {source}\n({unit})", color=MUTED, fontsize=8)
        caption += f" Below: {source}."
    last = axes[-1, 0]
    last.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    last.set_xlabel(report.axis)
    for ax in axes[:, 0]:
        ax.grid(axis="x", visible=False)
        ax.set_xlim(-0.5, len(values) - 0.5)
    return figure, caption


def scores_by_arm(report: Report, metric: Metric):
    """Plot the scores of non-numeric arms, with one row per arm."""
    comparisons, styles = compare(report, metric), arm_styles(report.arms)
    figure, ax = plt.subplots(
        figsize=(WIDTH, 0.9 + 0.36 * len(comparisons)), layout="constrained"
    )
    for i, comparison in enumerate(comparisons):
        draw_arm(ax, i, comparison, metric, styles, vertical=False, width=0.14)
    baseline_line(ax.axvline, report, metric)
    names = [c.arm.name.replace(", ", ",\n") for c in comparisons]
    ax.set_yticks(range(len(comparisons)), names, fontsize=8)
    ax.tick_params(axis="y", labelcolor=INK)
    ax.set_ylim(len(comparisons) - 0.5, -0.5)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.grid(axis="y", visible=False)
    ax.set_title(with_unit(f"Test {metric.label}", metric))
    return figure, scores_caption(metric, comparisons)


def baseline_line(draw, report: Report, metric: Metric) -> None:
    """Draw a line at the baseline's mean with `draw`, the axes' axhline or axvline."""
    mean = report.baseline.test[metric.name].mean()
    draw(mean, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)


def legend_below(figure, ax) -> None:
    """Add a legend below the axes, with as many columns as its labels allow."""
    handles, labels = ax.get_legend_handles_labels()
    longest = max(map(len, labels))
    columns = 4 if longest <= 8 else 3 if longest <= 14 else 2 if longest <= 28 else 1
    figure.legend(handles, labels, loc="outside lower left", ncols=columns)
    rows = -(-len(labels) // columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * rows)


def learning_curves(report: Report, metric: Metric):
    """Plot dev scores during training: the mean and the range over seeds."""
    drawn = [arm for arm in report.arms if len(arm.curves[metric.name][0])]
    if not drawn:
        return None
    styles = arm_styles(report.arms)
    figure, ax = plt.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    for arm in drawn:
        draw_range(ax, *arm.curves[metric.name], arm.name, styles)
    ax.set_xlabel("updates")
    ax.set_title(with_unit(f"Dev {metric.label} during training", metric))
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    legend_below(figure, ax)
    return figure, (
        f"Dev {metric.label} during training: the mean over seeds, and the range from "
        f"the lowest to the highest."
    )


def head_curves(report: Report):
    """Plot the statistics of heads during training; return None if not logged."""
    # differential and talking heads have only their largest logit
    drawn = {
        name: [arm for arm in report.arms if arm.heads and len(arm.heads[name][0])]
        for name in HEAD_STATISTICS
    }
    if not any(drawn.values()):
        return None
    styles = arm_styles(report.arms)
    figure, axes = plt.subplots(
        2, 2, figsize=(WIDTH, 4.2), sharex=True, layout="constrained"
    )
    for ax, (name, title) in zip(axes.flat, HEAD_STATISTICS.items(), strict=True):
        for arm in drawn[name]:
            draw_range(ax, *arm.heads[name], arm.name, styles)
        ax.set_title(title)
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for ax in axes[1]:
        ax.set_xlabel("updates")
    legend_below(figure, axes.flat[[*HEAD_STATISTICS].index("largest_logit")])
    return figure, (
        "What heads attend to during training: means over all heads and seeds, and the "
        "range over seeds."
    )


def draw_range(ax, steps, values, arm: str, styles: dict[str, tuple]) -> None:
    """Draw an arm's mean over seeds at each step, and its range from low to high."""
    colour, line, _ = styles[arm]
    ax.plot(steps, values.mean(0), color=colour, ls=line, lw=1.6, label=arm)
    if len(values) > 1:
        low, high = values.min(0), values.max(0)
        ax.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)


def scores_by_heads(report: Report):
    """Plot scores against the number of heads that learned gates left open.

    Return None if no arm has learned gates.
    """
    metric, styles = report.metric, arm_styles(report.arms)
    drawn = [c for c in compare(report, metric) if c.arm.open_heads]
    if not drawn:
        return None
    figure, ax = plt.subplots(figsize=(WIDTH, 2.7), layout="constrained")
    for comparison in drawn:
        name, mean = comparison.arm.name, comparison.summary.mean
        heads, _, low, high = summary(comparison.arm.open_heads)
        if len(comparison.arm.open_heads) >= MIN_SEEDS:
            ax.plot([max(low, 0), high], [mean, mean], color=styles[name][0], lw=1.2)
        draw_interval(ax, float(heads), comparison, metric, styles, label=name)
    baseline_line(ax.axhline, report, metric)
    ax.set_xlabel("heads left open")
    ax.set_title(with_unit(f"Test {metric.label}", metric))
    legend_below(figure, ax)
    return figure, (
        f"Test {metric.label} against the heads that learned gates left open, means "
        f"with 95% intervals over seeds; dashed: {report.baseline.name}."
    )


def costs(report: Report):
    """Plot scores against the number of parameters and the measured training time."""
    metric, styles = report.metric, arm_styles(report.arms)
    comparisons = compare(report, metric)
    panels = {
        "parameters, millions": [c.arm.parameters / 1e6 for c in comparisons],
        "seconds per trial": [c.arm.seconds for c in comparisons],
    }
    panels = {
        label: values
        for label, values in panels.items()
        if None not in values and len(set(values)) > 1
    }
    if not panels:
        return None
    is_direct = sum(len(c.arm.name) for c in comparisons) <= DIRECT
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(WIDTH, 2.7),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (label, values) in zip(axes[0], panels.items(), strict=True):
        for value, comparison in zip(values, comparisons, strict=True):
            name, mean = comparison.arm.name, comparison.summary.mean
            draw_interval(ax, value, comparison, metric, styles, label=name)
            if is_direct:
                place = {"xytext": (5, 4), "textcoords": "offset points"}
                ax.annotate(name, (value, mean), **place, fontsize=8, color=MUTED)
        ax.set_xlabel(label)
        ax.margins(x=0.15)
        ax.xaxis.set_major_locator(MaxNLocator(3))
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_title(with_unit(f"Test {metric.label}", metric))
    if not is_direct:
        legend_below(figure, axes[0, 0])
    caption = f"Test {metric.label} against the cost of an arm."
    if len({c.arm.parameters for c in comparisons}) == 1:
        caption += f" All arms have {comparisons[0].arm.parameters:,} parameters."
    return figure, caption


def to_svg(figure, name: str) -> str:
    """Return a figure as an SVG element that follows the page's colour scheme."""
    buffer = io.StringIO()
    with plt.rc_context(RC):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for colour, variable in THEME.items():
        svg = svg.replace(colour, f"var(--{variable})")
    ids = re.findall(r'\bid="([^"]+)"', svg)
    for old in sorted(set(ids), key=len, reverse=True):  # unique within the page
        new = f"{name}-{old}"
        svg = svg.replace(f'id="{old}"', f'id="{new}"')
        svg = svg.replace(f"#{old})", f"#{new})").replace(f'"#{old}"', f'"#{new}"')
    return svg
