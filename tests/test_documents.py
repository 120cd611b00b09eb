"""What README.md and docs/ tell to type, and the files that they name, are there."""

import re
from pathlib import Path

import pytest

from headcount.configs.base import get_config
from headcount.configs.commandline import flat

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py")]
FENCED = re.compile(r"^ *```.*?\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"python (?:-m )?([\w./]+)([^|&;\n]*)")
GIVEN = re.compile(r"(?<!\S)--([\w.-]+)(?:=([\w./]*))?")
DEFINED = re.compile(r"""DEFINE_\w+\(\s*"(\w+)"|add_argument\(\s*"--(\w+)""")
KEYS = flat(get_config().to_dict())


def flags_of(script: Path) -> set[str]:
    """What its source defines; to import two scripts would define a flag twice."""
    text = script.read_text()
    if "import cluster" in text:
        text += (ROOT / "training" / "cluster.py").read_text()
    found = {name for names in DEFINED.findall(text) for name in names if name}
    return found | {f"no{name}" for name in found}


def unknown(arguments: str, flags: set[str]) -> list[str]:
    """The flags and the keys of a config that are not there, and config files."""
    wrong = []
    for name, value in GIVEN.findall(arguments):
        of_config, _, key = name.partition(".")
        known = of_config == "config" and key in KEYS if key else name in flags
        wrong += [] if known else [f"--{name}"]
        if name == "config" and not (ROOT / value).is_file():
            wrong.append(value)
    return wrong


def wrong_in(text: str) -> list[str]:
    """What a document names and the repository does not have."""
    fenced = "\n".join(FENCED.findall(text)).replace("\\\n", " ")
    lines = [line.partition(" #")[0] for line in fenced.splitlines()]
    prose = FENCED.sub("", text)
    inline = [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", prose)]
    wrong = []
    for script, arguments in COMMAND.findall("\n".join(lines + inline)):
        if script == "pytest":
            continue
        name = script if script.endswith(".py") else f"{script.replace('.', '/')}.py"
        if (ROOT / name).is_file():
            wrong += unknown(arguments, flags_of(ROOT / name))
        else:
            wrong.append(script)
    every = set().union(*map(flags_of, SCRIPTS))
    for quoted in inline:
        if quoted.startswith("--"):
            wrong += unknown(quoted, every)
    folders = tuple(f"{path.name}/" for path in ROOT.glob("[!._]*") if path.is_dir())
    for path in (quoted.partition(":")[0] for quoted in inline if " " not in quoted):
        if path.startswith(folders) and not path.startswith("runs/"):
            wrong += [path] * (not (ROOT / path).exists())
    for link in re.findall(r"\]\(([^):#]+)(?:#[^)]*)?\)", prose):
        wrong += [link] * (not any((f / link).exists() for f in (ROOT, ROOT / "docs")))
    return wrong


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_what_is_there(path):
    assert wrong_in(path.read_text()) == []


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("```\npython eval.py --beam_sise=5\n```\n", "--beam_sise"),
        ("```\npython eval.py --seeds=5\n```\n", "--seeds"),  # sweep.py's
        ("```\nx | .venv/bin/python eval.py \\\n  --beam-size=5\n```\n", "--beam-size"),
        ("1. a\n\n   ```\n   python -m benchmarks.merge --size a\n   ```\n", "--size"),
        ("```\npython train.py --config.model.hedas=5\n```\n", "--config.model.hedas"),
        ("```\npython train.py --config=configs/no.py:a\n```\n", "configs/no.py"),
        ("```\npython -m models.describes\n```\n", "models.describes"),
        ("Say `python sweep.py list\n--ablations=heads`.", "--ablations"),
        ("Say `--config.sees=3`.", "--config.sees"),
        ("See `docs/no.md`.", "docs/no.md"),
        ("See [there](no.md#part).", "no.md"),
    ],
)
def test_what_is_not_there_is_found(text, wrong):
    assert wrong_in(text) == [wrong]
