"""A report as one HTML file that needs nothing else: light, dark, narrow, on paper."""

import html

from headcount.analysis.report import (
    Comparison,
    Report,
    costs_table,
    others_table,
    scores_table,
    verdict,
)
from headcount.analysis.report_legends import (
    HOW_TO_READ_COSTS,
    how_to_read_examples,
    how_to_read_others,
    how_to_read_scores,
)
from headcount.analysis.report_plots import themed_svg

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1d21; --muted: #6a6d75;
  --grid: #dfe1e6; --accent: #2f6fca; --soft: #f5f6f8; }
@media (prefers-color-scheme: dark) { :root { --page: #16171b; --ink: #e8e9ec;
  --muted: #9a9da6; --grid: #34363d; --accent: #7fb0f5; --soft: #1f2126; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 68rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
p, li { max-width: 44rem; }
.kicker { color: var(--muted); font-size: .8rem; letter-spacing: .06em;
  text-transform: uppercase; margin: 0 0 .6rem; }
h1 { font-size: clamp(1.5rem, 4.5vw, 2.15rem); line-height: 1.2; font-weight: 650;
  letter-spacing: -.015em; margin: 0 0 1rem; max-width: 44rem; text-wrap: balance; }
h2 { font-size: 1.1rem; font-weight: 650; margin: 3.2rem 0 .8rem; }
.verdict { font-size: 1.05rem; border-left: 3px solid var(--accent);
  padding-left: 1rem; margin: 1.6rem 0 2rem; }
.verdict p { margin: 0 0 .5rem; } .verdict p:last-child { margin: 0; }
.note, figcaption, .small { color: var(--muted); font-size: .875rem; line-height: 1.5; }
.scroll { overflow-x: auto; margin: 1rem 0; }
p.small { margin: .3rem 0; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .45rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
th { font-weight: 500; color: var(--muted); vertical-align: bottom;
  white-space: normal; min-width: 4.2rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky;
  left: 0; background: var(--page); }
td:first-child { font-weight: 550; }
tr.baseline td { background: var(--soft); }
table.text th, table.text td { text-align: left; white-space: normal; min-width: 11rem;
  vertical-align: top; position: static; font-weight: 400; overflow-wrap: anywhere;
  padding-left: 0; }
table.pairs td:last-child, table.pairs th:last-child { white-space: normal;
  text-align: left; overflow-wrap: anywhere; }
table.pairs td:first-child { font-weight: 400; color: var(--muted); }
figure { margin: 1.5rem 0 2.5rem; max-width: 54rem; }
figure svg { display: block; width: 100%; height: auto; min-width: 33rem; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 6px;
  overflow-x: auto; font-size: .85rem; line-height: 1.5; }
@media (max-width: 40rem) { main { padding: 2rem 1rem 3rem; }
  td:first-child { white-space: normal; max-width: 10rem; overflow-wrap: break-word; } }
@media print {
  :root { --page: #fff; --ink: #000; --muted: #444; --grid: #ccc; --accent: #1f5fb8;
    --soft: #f5f5f5; }
  main { max-width: none; padding: 0; } body { font-size: 10pt; }
  table { font-size: 7.5pt; } th, td { padding: .25rem .3rem; min-width: 0; }
  td:first-child { white-space: normal; }
  table.text th, table.text td { min-width: 0; }
  .scroll { overflow: visible; } figure svg { min-width: 0; max-height: 9cm; }
  figure, table, pre, .verdict { break-inside: avoid; } h2 { break-after: avoid; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
"""


def escape(text: str) -> str:
    """Text as HTML, a number and its percent sign on one line."""
    return html.escape(text).replace(" %", "&nbsp;%")


def page(report: Report, comparisons: list[Comparison], figures: dict) -> str:
    """The whole file.

    Args:
        report: what it tells.
        comparisons: of `analysis.report.compare`.
        figures: of `analysis.report_plots.figures`.
    """
    pictures = {name: figure_element(name, *figure) for name, figure in figures.items()}
    details = "".join(
        f"<p{' class=small' if is_setting(p) else ''}>{escape(p)}</p>"
        for p in paragraphs(report.details)
    )
    told = "".join(f"<p>{escape(s)}</p>" for s in verdict(report, comparisons))
    note = f'<p class="note">{escape(report.note)}</p>' if report.note else ""
    marks = {i for i, c in enumerate(comparisons) if c.arm.is_baseline}
    parts = [
        f'<p class="kicker">{escape(report.title)}</p>',
        f"<h1>{escape(report.question)}</h1>",
        details,
        f'<section class="verdict">{told}</section>',
        note,
        pictures.pop("scores", ""),
        f"<h2>Scores, {escape(report.name)}</h2>",
        table(scores_table(report, comparisons), marks),
        f'<p class="small">{escape(how_to_read_scores(report, comparisons))}</p>',
        anchor(report),
        "<h2>Learning curves</h2>" if "curves" in pictures else "",
        pictures.pop("curves", ""),
        "<h2>Other scores</h2>",
        table(others_table(report, comparisons), marks),
        f'<p class="small">{escape(how_to_read_others(report))}</p>',
        "<h2>Cost</h2>",
        table(costs_table(comparisons), marks),
        f'<p class="small">{escape(HOW_TO_READ_COSTS)}</p>',
        pictures.pop("costs", ""),
        examples(report),
        "<h2>Environment</h2>",
        table(
            [["", ""], *map(list, report.environment.items())], (), "pairs", head=False
        ),
        "<h2>The command</h2>",
        f"<pre>{escape(report.command)}</pre>",
        '<p class="small">The same command repeats it, and goes on where it was '
        "stopped. sweep.csv and sweep.sqlite have a row for every trial.</p>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{STYLE}</style></head>"
        f"<body><main>\n{chr(10).join(filter(None, parts))}\n</main></body></html>\n"
    )


def paragraphs(text: str) -> list[str]:
    """A docstring's paragraphs, each in one line; its settings a line each."""
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    lines = []
    for block in blocks:
        for word in ("Nuisance:", "Fixed:"):
            block = block.replace(f" {word}", f"\n{word}")
        lines += block.split("\n")
    return [line for line in lines if line]


def is_setting(paragraph: str) -> bool:
    """Whether it says what is scientific, nuisance or fixed."""
    return paragraph.startswith(("Scientific:", "Nuisance:", "Fixed:"))


def figure_element(name: str, figure, caption: str) -> str:
    """A picture with its caption."""
    return (
        f'<figure role="img" aria-label="{escape(caption)}"><div class="scroll">'
        f"{themed_svg(figure, name)}</div><figcaption>{escape(caption)}</figcaption>"
        f"</figure>"
    )


def table(rows: list[list[str]], marks=(), kind: str = "", head: bool = True) -> str:
    """A table of strings, its header first; `marks` are rows of the baseline."""
    header = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    body = "".join(
        f"<tr{' class=baseline' if i in marks else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for i, row in enumerate(rows[1:])
    )
    header = f"<thead><tr>{header}</tr></thead>" if head else ""
    return (
        f'<div class="scroll"><table class="{kind}">{header}'
        f"<tbody>{body}</tbody></table></div>"
    )


def anchor(report: Report) -> str:
    """Where the published column comes from."""
    if report.anchor is None:
        return ""
    source, unit = report.anchor
    return (
        f'<p class="small">Published: {escape(source)}, {escape(unit)}: other data and '
        f"a larger model, so compare the shape and not the height.</p>"
    )


def examples(report: Report) -> str:
    """Translations of the best and the worst arm."""
    if not report.examples:
        return ""
    arms = {f"best: {report.best}": "best", f"worst: {report.worst}": "worst"}
    if report.best == report.worst:  # it is one arm, or all are alike
        arms = {report.best: "best"}
    shown = {"source": "source", "reference": "reference"} | arms
    rows = [[getattr(e, name) for name in shown.values()] for e in report.examples]
    return (
        "<h2>Translations</h2>"
        + table([list(shown), *rows], (), "text")
        + f'<p class="small">{escape(how_to_read_examples(report))}</p>'
    )
