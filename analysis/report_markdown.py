"""A report as Markdown, with its pictures as PNG beside it."""

from headcount.analysis.report import (
    Comparison,
    Report,
    costs_table,
    others_table,
    scores_table,
    verdict,
)
from headcount.analysis.report_html import paragraphs
from headcount.analysis.report_legends import (
    HOW_TO_READ_COSTS,
    how_to_read_examples,
    how_to_read_others,
    how_to_read_scores,
)


def document(
    report: Report, comparisons: list[Comparison], pictures: dict[str, tuple[str, str]]
) -> str:
    """The whole text.

    Args:
        report: what it tells.
        comparisons: of `analysis.report.compare`.
        pictures: of every figure its path, relative to the document, and its caption.
    """

    def picture(name):
        if name not in pictures:
            return ""
        path, caption = pictures[name]
        return f"![{caption}]({path})\n\n*{caption}*"

    parts = [
        f"# {report.question}",
        f"*{report.title}*",
        *paragraphs(report.details),
        f"> {' '.join(verdict(report, comparisons))}",
        report.note or "",
        picture("scores"),
        f"## Scores, {report.name}",
        table(scores_table(report, comparisons)),
        how_to_read_scores(report, comparisons),
        f"Published: {', '.join(report.anchor)}." if report.anchor else "",
        "## Learning curves" if "curves" in pictures else "",
        picture("curves"),
        "## Other scores",
        table(others_table(report, comparisons)),
        how_to_read_others(report),
        "## Cost",
        table(costs_table(comparisons)),
        HOW_TO_READ_COSTS,
        picture("costs"),
        *examples(report),
        "## Environment",
        table([["", ""], *map(list, report.environment.items())]),
        "## The command",
        f"```\n{report.command}\n```",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def table(rows: list[list[str]]) -> str:
    """A table of strings, its header first; all but the first column to the right."""
    lines = [
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
        for row in rows
    ]
    rule = f"| --- |{' ---: |' * (len(rows[0]) - 1)}"
    return "\n".join([lines[0], rule, *lines[1:]])


def examples(report: Report) -> list[str]:
    """Translations of the best and the worst arm."""
    if not report.examples:
        return []
    arms = {f"best, {report.best}": "best", f"worst, {report.worst}": "worst"}
    if report.best == report.worst:  # it is one arm, or all are alike
        arms = {report.best: "best"}
    shown = {"source": "source", "reference": "reference"} | arms
    lists = [
        "\n".join(f"- {label}: {getattr(e, name)}" for label, name in shown.items())
        for e in report.examples
    ]
    told = how_to_read_examples(report)
    return ["## Translations", "\n\n---\n\n".join(lists), told]
