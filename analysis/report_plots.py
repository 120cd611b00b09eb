"""The pictures of a report: each a matplotlib figure, saved as PNG or themed SVG."""

import io
import re
from pathlib import Path

import matplotlib
import numpy as np

from headcount.analysis.report import NAMES, Comparison, Report

matplotlib.use("agg")
import matplotlib.pyplot as plt  # noqa: E402, once the backend is chosen
from matplotlib.ticker import MaxNLocator, NullLocator  # noqa: E402

INK, MUTED, GRID, ACCENT = "#1c1d21", "#6a6d75", "#dfe1e6", "#2f6fca"
# In an SVG these become variables of the page, which has a dark set of them.
THEME = {INK: "ink", MUTED: "muted", GRID: "grid", ACCENT: "accent"}
SERIES = (
    *("#2f6fca", "#1f9e89", "#7da32c", "#d19a1a", "#dd6e3b", "#c2456b"),
    *("#8b5fbf", "#5b7f95", "#a0785a", "#4aa3d8", "#b0569e", "#6f8f3f"),
)
LINES, MARKERS = ("-", (0, (4, 1.5)), (0, (1, 1)), "-."), "osD^"
DIRECT = 40  # letters of all arms' names that still go beside their points
STYLE = {
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
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "headcount",
}


def figures(report: Report, comparisons: list[Comparison]) -> dict[str, tuple]:
    """The report's figures by name, each with its caption."""
    with plt.rc_context(STYLE):
        scored = score_by_value if report.axis else score_by_arm
        made = {
            "scores": scored(report, comparisons),
            "curves": curves(report, comparisons),
            "costs": costs(report, comparisons),
        }
    return {name: figure for name, figure in made.items() if figure is not None}


def interval_and_seeds(ax, at, comparison, metric, *, vertical=True, width=0.06):
    """One arm: its seeds as dots, its mean with the interval beside them."""
    scores = comparison.arm.test[metric]
    colour = INK if comparison.arm.is_baseline else ACCENT
    offsets = at + np.linspace(-width, width, len(scores)) if len(scores) > 1 else [at]
    dots = (offsets, scores) if vertical else (scores, offsets)
    ax.scatter(*dots, s=14, color=colour, alpha=0.45, linewidths=0, zorder=3)
    mean, _, low, high = comparison.summary
    bar = {"yerr" if vertical else "xerr": [[mean - low], [high - mean]]}
    point = ([at], [mean]) if vertical else ([mean], [at])
    ax.errorbar(
        *point,
        **(bar if np.isfinite(low) else {}),
        fmt="o",
        ms=6.5,
        mec="none",
        color=colour,
        elinewidth=1.6,
        capsize=0,
        zorder=4,
    )


def score_by_value(report: Report, comparisons):
    """The score against the swept number, and what was published, below it."""
    comparisons = sorted(comparisons, key=lambda c: c.arm.value)
    values = [c.arm.value for c in comparisons]
    anchors = [(i, c.arm.published) for i, c in enumerate(comparisons)]
    anchors = [(i, score) for i, score in anchors if score is not None]
    rows = 2 if anchors else 1
    figure, axes = plt.subplots(
        rows,
        1,
        figsize=(7.2, 3.5 if rows == 1 else 4.9),
        height_ratios=[2.4, 1][:rows],
        sharex=True,
        squeeze=False,
        layout="constrained",
    )
    ax = axes[0, 0]
    for i, comparison in enumerate(comparisons):
        interval_and_seeds(ax, i, comparison, report.metric)
    reference_line(ax.axhline, report)
    ax.set_title(f"Test {report.name}")
    if anchors:
        below = axes[1, 0]
        below.plot(*zip(*anchors, strict=True), "D-", color=MUTED, mfc="none", lw=0.8)
        below.margins(y=0.25)
        source, unit = report.anchor
        below.set_title(f"Published: {source} ({unit})", color=MUTED)
    last = axes[-1, 0]
    last.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    last.set_xlabel(report.axis)
    for ax in axes[:, 0]:
        ax.grid(axis="x", visible=False)
        ax.set_xlim(-0.5, len(values) - 0.5)
    return figure, (
        f"Test {report.name} of every arm: the mean with its 95 % interval, and every "
        f"seed as a dot. The line is the baseline's mean."
        + (f" Below: {report.anchor[0]}." if anchors else "")
    )


def score_by_arm(report: Report, comparisons):
    """The score of arms that are no numbers, a row each."""
    figure, ax = plt.subplots(
        figsize=(7.2, 0.9 + 0.36 * len(comparisons)), layout="constrained"
    )
    for i, comparison in enumerate(comparisons):
        interval_and_seeds(ax, i, comparison, report.metric, vertical=False, width=0.14)
    reference_line(ax.axvline, report)
    ax.set_yticks(range(len(comparisons)), [c.arm.name for c in comparisons])
    ax.tick_params(axis="y", labelcolor=INK)
    ax.set_ylim(len(comparisons) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    ax.set_title(f"Test {report.name}")
    return figure, (
        f"Test {report.name} of every arm: the mean with its 95 % interval, and every "
        f"seed as a dot. The line is the baseline's mean."
    )


def reference_line(draw, report: Report) -> None:
    """The baseline's mean across a picture; `draw` is an ax's axvline or axhline."""
    mean = report.baseline.test[report.metric].mean()
    draw(mean, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=1)


def looks(comparisons: list[Comparison]) -> list[tuple]:
    """A colour, a line and a marker for every arm.

    Arms whose names begin alike, as "mean" and "mean, equal parameters", have a colour
    in common.
    """
    families = [c.arm.name.split(", ")[0] for c in comparisons]
    order = list(dict.fromkeys(families))
    colours = [SERIES[order.index(family) % len(SERIES)] for family in families]
    turns = [colours[:i].count(colour) for i, colour in enumerate(colours)]
    return [
        (colour, LINES[turn % len(LINES)], MARKERS[turn % len(MARKERS)])
        for colour, turn in zip(colours, turns, strict=True)
    ]


def curves(report: Report, comparisons):
    """Dev scores while training: the mean of the seeds, and their range as a band."""
    drawn = [c for c in comparisons if len(c.arm.curve[0])]
    if not drawn:
        return None
    # while training nothing is scored by the published protocol
    metric = NAMES[report.metric.removeprefix("published_")]
    figure, ax = plt.subplots(figsize=(7.2, 3.6), layout="constrained")
    for comparison, (colour, line, _) in zip(drawn, looks(drawn), strict=True):
        steps, scores = comparison.arm.curve
        name = comparison.arm.name
        ax.plot(steps, scores.mean(0), color=colour, ls=line, lw=1.6, label=name)
        if len(scores) > 1:
            low, high = scores.min(0), scores.max(0)
            ax.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)
    ax.set_xlabel("updates")
    ax.set_title(f"Dev {metric} while training, greedy")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8, labelcolor=INK)
    return figure, (
        f"Learning curves: dev {metric} of greedy translations, the mean of the "
        f"seeds and the range from the lowest to the highest."
    )


def costs(report: Report, comparisons):
    """The score against parameters and against the measured time of a training."""
    panels = {
        "parameters, millions": [c.arm.parameters / 1e6 for c in comparisons],
        "seconds a trial": [c.arm.seconds for c in comparisons],
    }
    panels = {
        label: values
        for label, values in panels.items()
        if None not in values and len(set(values)) > 1
    }
    if not panels:
        return None
    direct = sum(len(c.arm.name) for c in comparisons) <= DIRECT
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(7.2, 3.3 if direct else 3.6 + 0.15 * len(comparisons)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for ax, (label, values) in zip(axes[0], panels.items(), strict=True):
        for value, comparison, look in zip(
            values, comparisons, looks(comparisons), strict=True
        ):
            priced(ax, value, comparison, None if direct else look)
        ax.set_xlabel(label)
        ax.margins(x=0.12)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0, 0].set_title(f"Test {report.name}")
    if not direct:
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(
            *handles, loc="outside lower left", ncols=3, fontsize=8, labelcolor=INK
        )
    same = len({c.arm.parameters for c in comparisons}) == 1
    return figure, (
        f"Test {report.name} against what an arm costs, as measured."
        + (
            f" All arms have {comparisons[0].arm.parameters:,} parameters."
            if same
            else ""
        )
    )


def priced(ax, value, comparison: Comparison, look) -> None:
    """An arm's mean with its interval at what it costs, named or as a legend has it."""
    mean, _, low, high = comparison.summary
    own = INK if comparison.arm.is_baseline else ACCENT
    colour, _, marker = look or (own, None, "o")
    ax.errorbar(
        [value],
        [mean],
        **({"yerr": [[mean - low], [high - mean]]} if np.isfinite(low) else {}),
        fmt=marker,
        ms=5.5,
        mec="none",
        color=colour,
        elinewidth=1.2,
        capsize=0,
        label=comparison.arm.name,
    )
    if look is None:
        ax.annotate(
            comparison.arm.name,
            (value, mean),
            xytext=(5, 4),
            textcoords="offset points",
            fontsize=7.5,
            color=MUTED,
        )


def save_png(figure, path: Path) -> None:
    """For Markdown and paper: on white."""
    figure.savefig(path, dpi=160, facecolor="white")


def themed_svg(figure, label: str) -> str:
    """An SVG element for a page, in its font and its colours, light or dark."""
    buffer = io.StringIO()
    with plt.rc_context(STYLE):  # text stays text, and ids the same every time
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    for colour, name in THEME.items():
        svg = svg.replace(colour, f"var(--{name})")
    ids = re.findall(r'\bid="([^"]+)"', svg)
    for old in sorted(set(ids), key=len, reverse=True):  # unique within the page
        new = f"{label}-{old}"
        svg = svg.replace(f'id="{old}"', f'id="{new}"')
        svg = svg.replace(f"#{old})", f"#{new})").replace(f'"#{old}"', f'"#{new}"')
    return svg
