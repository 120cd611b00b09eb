"""Render a report as Markdown, from which the HTML page is made, too."""

import math
import re

from headcount.analysis.formatting import NOTHING
from headcount.analysis.report import (
    VERDICTS_HEADER,
    Comparison,
    Report,
    compare,
    costs_table,
    margin_text,
    others_table,
    scores_table,
    summary_sentences,
    trend_text,
    verdict_cells,
    with_unit,
)
from headcount.analysis.significance import LEVEL
from headcount.tasks.base import Metric

CHECKPOINTS = {
    "best": "Checkpoints were chosen on dev",
    "last": "The last checkpoint of every trial is scored",
    "average": "The mean of the checkpoints that every trial kept is scored",
}
COSTS = (
    "F: feed-forward width, solved where arms are matched. Multiply-adds: of the "
    "matrix products of a forward pass, per token of each side. Seconds: of the "
    "updates alone, without compilation, evaluation and saving; a group's time divided "
    "by its trials. Tokens/s: of a whole group, all sides."
)


def write_markdown(report: Report, figures: dict[str, tuple[str, str]]) -> str:
    """Return the report as a Markdown document.

    Args:
        figures: by name, each figure's path (relative to the document) and caption.
    """
    by_outcome = {m.name: compare(report, m) for m in report.outcomes}
    comparisons = by_outcome[report.metric.name]
    other_scores = others_table(report, comparisons)
    parts = [
        f"# {escape(report.question)}",
        f"*{escape(report.title)}*",
        *map(escape, paragraphs(report.details)),
        "\n".join(
            f"> {escape(sentence)}\n>"
            for sentence in summary_sentences(report, comparisons)
        ),
        escape(report.note or ""),
        *(figure(figures, f"test_{metric.name}") for metric in report.outcomes),
        *verdicts(report),
        "## Scores",
    ]
    for metric in report.outcomes:
        rows = scores_table(report, metric, by_outcome[metric.name])
        direction = "" if metric.higher_is_better else " (lower is better)"
        parts.append(f"### {escape(with_unit(metric.label, metric))}{direction}")
        parts.append(table(rows, report.baseline.name))
    parts.append(escape(trend_text(report) or ""))
    parts.append(escape(explain_scores(report, comparisons)))
    if report.anchors:
        sources = "; ".join(
            f"{anchor.source}, {anchor.unit}" for anchor in report.anchors
        )
        parts.append(
            f"Published: {escape(sources)}. These come from other data "
            f"and a larger model, so compare only the shapes of the curves."
        )
    curves = [figure(figures, f"dev_{m.name}") for m in curve_metrics(report)]
    parts += ["## Learning curves" if any(curves) else "", *curves]
    parts += heads(report, figure(figures, "heads"))
    if other_scores:
        parts += ["## Other scores", table(other_scores, report.baseline.name)]
        parts.append(escape(explain_others(report)))
    parts += ["## Cost", table(costs_table(comparisons), report.baseline.name), COSTS]
    parts += [figure(figures, "heads_left")]
    parts += [figure(figures, "costs"), *examples(report), "## Environment"]
    environment = [[name, value] for name, value in report.environment.items()]
    parts.append(table([["", ""], *environment], is_numbers=False))
    parts += ["## Command", f"```\n{report.command}\n```"]
    parts.append(
        "Rerunning it resumes or repeats the sweep. `sweep.csv` and `sweep.sqlite` "
        "have a row for every trial."
    )
    return "\n\n".join(filter(None, parts)) + "\n"


def join_markdown(
    title: str, parts: list[str], verdicts: list[tuple[str, Report, dict]]
) -> str:
    """Join several reports into one document that starts with all their verdicts.

    Args:
        title: title of the page.
        parts: the reports, with their headings moved down by one level.
        verdicts: every verdict with the name of its sweep and its report.
    """
    rows = [["sweep", "score", *VERDICTS_HEADER, "looks", "margin"]]
    for name, report, row in verdicts:
        score = f"{with_unit(report.metric.label, report.metric)} on {row['split']}"
        looks = row["looks"].replace(",", ", ") or NOTHING
        margin = NOTHING if row["margin"] is None else f"{row['margin']:g}"
        rows.append([name, score, *verdict_cells(report, row), looks, margin])
    note = (
        "The error rate of 5% holds for each sweep, not for all of them together. Each "
        "sweep has its own baseline."
    )
    head = [f"# {escape(title)}", "## All verdicts", table(rows), note]
    return "\n\n".join([*head, *(part.strip() for part in parts)]) + "\n"


def verdicts(report: Report) -> list[str]:
    """Return the section on verdicts."""
    if not report.verdicts:
        return []
    first = report.verdicts[0]
    label, split = with_unit(report.metric.label, report.metric), first["split"]
    looks = first["looks"]
    procedure = (
        f"Looks were planned after {looks.replace(',', ', ')} seeds. Arms got no more "
        f"seeds once they were decided, or once more were unlikely to decide them. The "
        f"boundaries spend the error rate over the looks (Lan and DeMets 1983), and "
        f"the intervals hold at all looks at once (Jennison and Turnbull 1989)."
        if report.is_planned
        else f"Seeds were added without a plan, so the intervals are those of looks "
        f"after {looks.replace(',', ', ')} seeds."
        if looks
        else "This holds only if the number of seeds was fixed before any result was "
        "seen. Holm's correction of p-values is a little less strict, so an arm with a "
        "p of at most 5% may be undecided."
    )
    margin = first["margin"]
    equivalent = (
        "Without a margin (--margin) no arm can be equivalent."
        if margin is None
        else "Equivalent: two one-sided tests (Schuirmann 1987) reject a difference of "
        f"{margin_text(report.metric, margin)} either way. Their bounds are narrower "
        f"than the interval shown, which may extend beyond the margin."
    )
    explained = (
        f"By {label} on {split}, paired by seed. The probability of any false verdict "
        f"over all arms is at most {LEVEL:.0%}: each arm has an equal share of it, so "
        f"the intervals are wider than single 95% intervals. {procedure} {equivalent} "
        f"{report.cost}"
    )
    sentences = "\n".join(f"- {escape(row['sentence'])}" for row in report.verdicts)
    cells = [verdict_cells(report, row) for row in report.verdicts]
    rows = table([VERDICTS_HEADER, *cells])
    return ["## Verdicts", sentences, rows, escape(explained)]


def heads(report: Report, logged: str) -> list[str]:
    """Return the section on the heads of the arms, if anything was measured.

    Args:
        logged: the figure of what was logged during training, or "".
    """
    parts = [logged]
    for tables, legend in report.heads:
        for site, lines in tables.items():
            parts += [f"### {site}", table(lines, report.baseline.name)]
        parts += map(escape, legend)
    return ["## Heads", *parts] if any(parts) else []


def escape(text: str) -> str:
    r"""Escape plain text as one line of Markdown.

    Underscores within words have no meaning in Markdown and are not escaped.
    """
    text = " ".join(text.split())
    text = re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", text)
    text = re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)
    # characters that would start a heading, a list or a rule
    text = re.sub(r"^(#|[-+=](?=\s|$|[-=]))", r"\\\1", text)
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", text)


def paragraphs(text: str) -> list[str]:
    """Split a docstring into paragraphs; start new ones at "Nuisance:" and "Fixed:"."""
    lines = []
    for block in (" ".join(block.split()) for block in text.split("\n\n")):
        for word in ("Nuisance:", "Fixed:"):
            block = block.replace(f" {word}", f"\n{word}")
        lines += block.split("\n")
    return [line for line in lines if line]


def table(
    rows: list[list[str]], bold: str | None = None, is_numbers: bool = True
) -> str:
    """Format a table; the first row is its header.

    Args:
        bold: first cell of the row to highlight.
        is_numbers: whether to right-align all columns but the first.
    """
    lines = []
    for row in rows:
        cells = [escape(cell) for cell in row]
        if row[0] == bold:
            cells[0] = f"**{cells[0]}**"
        lines.append(f"| {' | '.join(cells)} |")
    num_columns = len(rows[0]) - 1
    rule = f"| --- |{(' ---: |' if is_numbers else ' --- |') * num_columns}"
    return "\n".join([lines[0], rule, *lines[1:]])


def figure(figures: dict[str, tuple[str, str]], name: str) -> str:
    """Return a figure with its caption, or "" if there is no such figure."""
    if name not in figures:
        return ""
    path, caption = figures[name]
    return f"![{escape(caption)}]({path})\n\n*{escape(caption)}*"


def curve_metrics(report: Report) -> list[Metric]:
    """Return the metrics of the learning curves: the loss, then `report.curve_metric`.

    The latter replaces `report.metric`, which may not be evaluated during training.
    """
    losses = [metric for metric in report.outcomes if metric != report.metric]
    return [*losses, *[report.curve_metric] * (report.curve_metric not in losses)]


def explain_scores(report: Report, comparisons: list[Comparison]) -> str:
    """Explain the columns of the tables of outcomes."""
    tested = sum(not math.isnan(c.p) for c in comparisons)
    level = f"{LEVEL:.0%}" + (f" / {tested}" if tested > 1 else "")
    is_even = all(c.arm.seeds == report.baseline.seeds for c in comparisons)
    sentences = ["All arms are trained with the same seeds."] if is_even else []
    sentences += [
        "Mean ± sd: over seeds. Intervals: Student's, 95%. Difference: to the "
        "baseline, paired by seed."
    ]
    sentences += [
        "Seeds were added depending on dev scores, which these intervals ignore: only "
        "the verdicts and their intervals account for the looks."
        if report.is_planned
        else "p: two-sided t-test, corrected (Holm) for the number of tested arms, in "
        "each table separately; arms whose seeds all differ by the same amount are not "
        "tested. The intervals are not corrected."
    ]
    margins = [margin_text(m) for m in report.outcomes if m.margin is not None]
    if margins:
        sentences.append(
            f"Seeds to see {' or '.join(margins)}: how many seeds a paired test needs "
            f"to find a true difference of that size with a power of 80%, at Holm's "
            f"level for the smallest p-value ({level}). It is computed from the spread "
            f"of the differences, so it is rough if there are few seeds."
        )
    sentences.append(
        f"{CHECKPOINTS[report.checkpoint]}; test was scored once, after that."
    )
    if report.has_search:
        sentences.append(
            "Nuisance settings were chosen on dev before that, with other seeds than "
            "those in the tables."
        )
    elif "Nuisance:" in (report.details or ""):
        sentences.append(
            "Nuisance settings were not searched: they are the config's or the "
            "ablation's, and may suit one arm better than another."
        )
    return " ".join(sentences)


def explain_others(report: Report) -> str:
    """Explain the columns of the table of other scores."""
    sentences = ["Scores: on test, mean ± sd over seeds."]
    if report.bootstrap_metric is not None:
        label = report.bootstrap_metric.label
        sentences.append(
            f"Test set's ±: half of the 95% interval of {label} when the test examples "
            f"are resampled (paired bootstrap, {seed_text(report)}). This is how much "
            f"{label} would vary with other test examples; more seeds do not reduce "
            f"it. p (bootstrap): for no difference between the arm's {label} and the "
            f"baseline's under the same resampling. It compares one training run of "
            f"each, ignores the variation over seeds, and is not corrected."
        )
    return " ".join(sentences)


def seed_text(report: Report) -> str:
    """Name the seed of the bootstrap and the examples."""
    return "each arm's first seed" if report.seed is None else f"seed {report.seed}"


def examples(report: Report) -> list[str]:
    """Return the section with predictions of the best and the worst arm."""
    if not report.examples:
        return []
    arms = {"best": f"best, {report.best}", "worst": f"worst, {report.worst}"}
    if report.best == report.worst:  # only one arm, or all arms have the same score
        arms = {"best": report.best}
    blocks = []
    for example in report.examples:
        lines = dict(example.text)
        lines |= {label: getattr(example, name) for name, label in arms.items()}
        blocks.append(
            "\n".join(
                f"- {escape(k)}: {escape(v) or '(empty)'}" for k, v in lines.items()
            )
        )
    differ = len(arms) == 2 and all(e.best != e.worst for e in report.examples)
    return [
        "## Examples",
        f"From {seed_text(report)}, spread evenly over the test set"
        f"{'; only examples on which the arms differ' * differ}.",
        "\n\n---\n\n".join(blocks),
    ]
