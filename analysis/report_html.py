"""Render a report's Markdown as one self-contained, responsive HTML file."""

import html

from markdown_it import MarkdownIt

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1c1d21; --muted: #6a6d75;
  --grid: #dfe1e6; --accent: #2f6fca; --soft: #f5f6f8; --shade: #0003; }
@media (prefers-color-scheme: dark) { :root { --page: #16171b; --ink: #e8e9ec;
  --muted: #9a9da6; --grid: #34363d; --accent: #7fb0f5; --soft: #1f2126;
  --shade: #000c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 68rem; margin: 0 auto; padding: 3.5rem 1.5rem 5rem; }
p, li { max-width: 44rem; overflow-wrap: anywhere; }
h1 { font-size: clamp(1.5rem, 4.5vw, 2.15rem); line-height: 1.2; font-weight: 650;
  letter-spacing: -.015em; margin: 0 0 1rem; max-width: 44rem; text-wrap: balance; }
h2 { font-size: 1.1rem; font-weight: 650; margin: 3.2rem 0 .8rem; }
h3 { font-size: .95rem; font-weight: 600; margin: 1.6rem 0 .4rem; }
em { font-style: normal; }
p:has(> em:only-child), .scroll + p, h2 + .scroll + p, ul + p { color: var(--muted);
  font-size: .875rem; line-height: 1.5; }
blockquote { font-size: 1.05rem; border-left: 3px solid var(--accent);
  padding-left: 1rem; margin: 1.6rem 0 2rem; }
blockquote p { margin: 0 0 .5rem; } blockquote p:last-child { margin: 0; }
hr { border: 0; border-top: 1px solid var(--grid); max-width: 44rem; margin: 1rem 0; }
ul { padding-left: 1.2rem; margin: 1rem 0; }
.scroll { overflow-x: auto; margin: 1rem 0;  /* shades where there is more to see */
  background: linear-gradient(to right, var(--page), var(--page)) left / 1.5rem 100%,
    linear-gradient(to left, var(--page), var(--page)) right / 1.5rem 100%,
    linear-gradient(to right, var(--shade), transparent) left / .8rem 100%,
    linear-gradient(to left, var(--shade), transparent) right / .8rem 100%;
  background-repeat: no-repeat;
  background-attachment: local, local, scroll, scroll; }
table { border-collapse: collapse; font-size: .875rem; line-height: 1.4;
  font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .45rem .6rem; text-align: left;
  border-bottom: 1px solid var(--grid); }
td[style] { white-space: nowrap; }
th { font-weight: 500; color: var(--muted); vertical-align: bottom; min-width: 4.2rem; }
td { overflow-wrap: break-word; }
td:last-child { overflow-wrap: anywhere; }
th:first-child, td:first-child { padding-left: 0; white-space: nowrap;
  position: sticky; left: 0; background: var(--page); }
tr:has(td:first-child > strong) td { background: var(--soft); }
table:not(:has(th[style])) td:first-child { color: var(--muted); position: static; }
table:not(:has(th[style])) thead { display: none; }
.figure { display: block; max-width: 38rem; margin: 1.5rem 0 0; }
.figure svg { display: block; width: 100%; height: auto; }
p:has(.figure) { max-width: none; margin-bottom: .3rem; }
pre { background: var(--soft); padding: .8rem 1rem; border-radius: 6px;
  overflow-x: auto; font-size: .85rem; line-height: 1.5; }
@media (max-width: 40rem) { main { padding: 2rem 1rem 3rem; }
  th:first-child, td:first-child { white-space: normal; min-width: 5rem;
    max-width: 10rem; } }
@media print {
  :root { --page: #fff; --ink: #000; --muted: #444; --grid: #ccc; --accent: #1f5fb8;
    --soft: #f5f5f5; --shade: transparent; }
  main { max-width: none; padding: 0; } body { font-size: 10pt; }
  table { font-size: 7.5pt; } th, td { padding: .25rem .3rem; min-width: 0; }
  td:first-child { white-space: normal; }
  .scroll { overflow: visible; } .figure svg { max-height: 9cm; }
  .figure, table, pre, blockquote { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  pre { white-space: pre-wrap; overflow-wrap: anywhere; } }
"""


def to_html(markdown: str, title: str, figures: dict[str, str]) -> str:
    """Render Markdown as an HTML page that needs no other file.

    Args:
        figures: SVG elements to replace images with, by the image's path.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")

    def image(renderer, tokens, index, options, env):
        token = tokens[index]
        label = renderer.renderInlineAsText(token.children, options, env)
        return (
            f'<span class="figure" role="img" aria-label="{html.escape(label)}">'
            f"{figures[token.attrs['src']]}</span>"
        )

    def table_open(*_):
        return '<div class="scroll"><table>\n'

    def table_close(*_):
        return "</table></div>\n"

    for rule in (image, table_open, table_close):
        parser.add_render_rule(rule.__name__, rule)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>\n{parser.render(markdown)}\n</main></body></html>\n"
    )
