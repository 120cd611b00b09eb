"""Write docs/reference/config.md from the keys and comments of configs/base.py.

python docs/generate.py
"""

import ast
import io
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "configs" / "base.py"
TARGET = ROOT / "docs" / "reference" / "config.md"
HEAD = """# Config keys

*Written by `python docs/generate.py` from [configs/base.py](../../configs/base.py).
Do not edit.*

Set any key on the command line, as in `--config.model.attention.num_heads=8`. A key
whose default is `None` takes `None` too. An unknown key is an error that names similar
keys.
"""
SITES = """## model.encoder_attention, model.decoder_attention, model.cross_attention

The keys of `model.attention` for one site: encoder self-attention, decoder
self-attention, cross-attention. All default to `None`: as in `model.attention`.
"""


class Key(NamedTuple):
    """One config key."""

    section: str
    name: str
    kind: str
    default: str
    meaning: str


def main() -> None:
    """Write the page."""
    TARGET.write_text(render())


def render() -> str:
    """Return the page."""
    titles, keys = read()
    parts = [HEAD]
    for section, comment in titles.items():
        parts.append(f"## {section or 'Top level'}\n")
        if comment:
            parts.append(f"{comment}.\n")
        lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            if key.section == section:
                cells = f"`{key.name}`", key.kind, f"`{key.default}`", key.meaning
                lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
        if section == "model.attention":
            parts.append(SITES)
    return "\n".join(parts)


def read() -> tuple[dict[str, str], list[Key]]:
    """Return the comment of each section, and all keys, in the order of the file.

    A comment is that at the end of the line, after the one above it. Several keys in a
    row may share the one above the first.
    """
    text = SOURCE.read_text()
    inline, above = comments(text)
    (function,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)
    )
    sections, titles, keys, shared = {"config": ""}, {"": ""}, [], ""
    for node in function.body:
        if not isinstance(node, ast.Assign):
            continue
        paths = [t for t in node.targets if isinstance(t, ast.Attribute)]
        path = dotted(paths[0], sections) if paths else None
        names = [t.id for t in node.targets if isinstance(t, ast.Name)]
        own, before = inline.get(node.end_lineno, ""), above.get(node.lineno, "")
        if names and path:  # config.data = data = ConfigDict()
            sections[names[0]] = path
            titles[path] = joined(before, own)
            shared = ""
        elif path:
            section, _, name = path.rpartition(".")
            shared = before or ("" if own else shared)
            kind, default = value_of(node.value)
            keys.append(Key(section, name, kind, default, joined(shared, own)))
    return titles, keys


def comments(text: str) -> tuple[dict[int, str], dict[int, str]]:
    """Return comments by line: at its end, and in the lines just above it."""
    inline, above, block = {}, {}, []
    code = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        words = token.string.lstrip("# ")
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            block.append(words)
        elif token.type == tokenize.COMMENT:
            inline[token.start[0]] = words
        elif token.type == tokenize.NAME and token.start[0] not in code:
            code.add(token.start[0])
            if block:
                above[token.start[0]] = " ".join(block)
                block = []
    return inline, above


def joined(*parts: str) -> str:
    """Join comments into a cell of a table."""
    return ". ".join(x.removesuffix(".") for x in parts if x).replace("|", "\\|")


def dotted(node: ast.Attribute, sections: dict[str, str]) -> str:
    """Return the config path of an assignment's target."""
    prefix = sections[node.value.id]
    return f"{prefix}.{node.attr}" if prefix else node.attr


def value_of(node: ast.expr) -> tuple[str, str]:
    """Return the type and the default of a key."""
    if isinstance(node, ast.Call):  # placeholder(int)
        return node.args[0].id, "None"
    value = ast.literal_eval(node)
    text = ast.unparse(node)
    if isinstance(value, float):
        text = f"{value:g}"
    return type(value).__name__, text.replace("'", '"')


if __name__ == "__main__":
    sys.exit(main())
