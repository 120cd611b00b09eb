"""README.md, docs/, the Makefile and docstrings: commands, keys, paths and links hold.

Nothing is run. Flags are read from the source of a script and of the modules that it
imports, since two scripts that define the same flag can't be imported together.
"""

import ast
import csv
import functools
import importlib
import importlib.util
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from headcount.configs import ablations, modern, presets
from headcount.configs.base import get_config
from headcount.configs.validation import flat

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SCRIPTS = sorted(p for p in ROOT.glob("*.py") if "def main" in p.read_text())
SOURCES = [*SCRIPTS, *sorted((ROOT / "configs").glob("*.py"))]

SUFFIXES = ("py", "json", "jsonl", "safetensors", "txt", "tsv", "en", "de")
KEYS = flat(get_config().to_dict())
SECTIONS = {key.rsplit(".", n)[0] for key in KEYS for n in range(1, key.count(".") + 1)}
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(
    r"""(?:\bpython3?|\$\(RUN\)) (-m [\w.]+|[\w/]+\.py)([^|&;\n`"]*)"""
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def modules_of(path: Path) -> frozenset[Path]:
    """The file and all files of ours that it imports, directly or not."""
    found, waiting = {path}, [path]
    while waiting:
        for node in ast.walk(parsed(waiting.pop())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
                for name in names:
                    parts = name.split(".")[1 if name.startswith("headcount") else 0 :]
                    file = ROOT.joinpath(*parts).with_suffix(".py")
                    if parts and file.is_file() and file not in found:
                        found.add(file)
                        waiting.append(file)
    return frozenset(found)


@functools.cache
def definitions(path: Path) -> dict[str, ast.Call]:
    """The calls that define a script's flags, by name; for argparse likewise."""
    calls = {}
    for file in modules_of(path):
        for node in ast.walk(parsed(file)):
            name = getattr(getattr(node, "func", None), "attr", "")
            if name.startswith("DEFINE_") or name == "add_argument":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    calls[first.value.removeprefix("--")] = node
    return calls


def parser(path: Path) -> flags.FlagValues:
    """The flags of a script, without --config."""
    values = flags.FlagValues()
    for name, call in definitions(path).items():
        kind = call.func.attr
        try:
            arguments = [ast.literal_eval(argument) for argument in call.args[1:]]
            define = getattr(flags, kind)
        except (ValueError, AttributeError):  # an argument is not a literal
            arguments, define = [None, ""], flags.DEFINE_string
            if kind == "DEFINE_bool":
                define = flags.DEFINE_bool
        if kind != "DEFINE_config_file":
            define(name, *arguments, flag_values=values)
    return values


@functools.cache
def verbs(path: Path) -> tuple[str, ...]:
    """The first arguments that a script takes: its VERBS, a tuple or a dict's keys."""
    for node in parsed(path).body:
        names = [getattr(t, "id", None) for t in getattr(node, "targets", [])]
        if "VERBS" in names:
            values = getattr(node.value, "keys", None) or node.value.elts
            return tuple(value.value for value in values)
    return ()


def config_errors(name: str, values: list[str]) -> list[str]:
    """What is wrong with --config=NAME, or with --config.KEY=VALUE."""
    if name == "config":
        file, _, variant = values[0].partition(":")
        if not (ROOT / file).is_file():
            return [file]
        if variant in ("", "NAME") or Path(file).stem == "run":
            return []
        module = importlib.import_module(f"headcount.configs.{Path(file).stem}")
        try:
            module.get_config(variant)
        except (ValueError, TypeError):
            return [values[0]]
        return []
    key = name.removeprefix("config.")
    if key not in KEYS:
        return [f"--{name}"]
    *parents, last = key.split(".")
    section = functools.reduce(getattr, parents, get_config())
    kind, value = section.get_type(last), values[0]
    try:
        if kind in (int, float) and value != "None":
            kind(value)
        if kind is bool and value.lower() not in ("true", "false"):
            raise ValueError
    except ValueError:
        return [f"--{name}={value}"]
    return []


def command_errors(script: str, arguments: str) -> list[str]:
    """What of a command line is not there."""
    file = script.removeprefix("-m ")
    if file == "pytest":
        return []
    if script.startswith("-m "):
        file = file.removeprefix("headcount.").replace(".", "/")
        is_package = (ROOT / file).is_dir()
        file = f"{file}/__main__.py" if is_package else f"{file}.py"
    path = ROOT / file
    if not path.is_file():
        return [script.removeprefix("-m ")]
    words = shlex.split(arguments.split(" < ")[0].split(" > ")[0])
    words = [word for word in words if word != "..."]
    if verbs(path):
        if not words or words[0] not in verbs(path):
            return [f"{file} {' '.join(words[:1])}"]
        words = words[1:]
    known, wrong, rest = definitions(path), [], []
    is_argparse = "argparse" in path.read_text()
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            wrong += [] if is_argparse else [word]
        elif is_argparse:
            wrong += [] if name in known else [f"--{name}"]
        elif name == "config" or name.startswith("config."):
            is_taken = "config" in known and equals
            wrong += config_errors(name, [value]) if is_taken else [f"--{name}"]
        else:
            if name == "ablation" and ".py:" not in value:
                wrong += [] if callable(getattr(ablations, value, None)) else [value]
            rest.append(word)
    try:
        parser(path)([file, *rest])
    except flags.UnrecognizedFlagError as error:
        wrong.append(f"--{error.flagname}")
    except flags.Error as error:
        wrong.append(str(error))
    return wrong


def commands_in(text: str) -> list[tuple[str, str]]:
    """The commands in text, joined over line ends, without comments."""
    lines = text.replace("\\\\\n", " ").replace("\\\n", " ").splitlines()
    joined = "\n".join(line.partition("  #")[0] for line in lines)
    return COMMAND.findall(joined)


def quoted_errors(quoted: str) -> list[str]:
    """What inline code names that is not there: flags, config keys, paths."""
    if quoted.startswith("--"):
        words, wrong = shlex.split(quoted), []
        for word in words:
            name, _, value = word.removeprefix("--").partition("=")
            if name == "config.KEY":  # any
                continue
            if name.startswith("config."):
                wrong += config_errors(name, [value]) if value else []
                wrong += [] if name.removeprefix("config.") in KEYS else [word]
            elif word.startswith("--") and name not in every_flag():
                wrong.append(word)
        return wrong
    key = re.fullmatch(
        r"((?:data|mesh|model|optimizer|task|train)\.[\w.]+)(=.*)?", quoted
    )
    if key and key[1].rpartition(".")[2] in SUFFIXES:
        return []
    if key:
        return [] if key[1] in KEYS or key[1] in SECTIONS else [key[1]]
    path = quoted.partition(":")[0].partition(",")[0]
    first = path.partition("/")[0]
    if "/" not in path or " " in path or re.search("[A-Z]{3}", path.split("README")[0]):
        return []
    is_ours = (ROOT / first).is_dir() and first not in ("runs", ".venv")
    return [path] if is_ours and not list(ROOT.glob(path.rstrip("/"))) else []


@functools.cache
def every_flag() -> set[str]:
    """The flags of all scripts and benchmarks."""
    files = [*SCRIPTS, *(ROOT / "benchmarks").glob("*.py")]
    names = set().union(*(definitions(file) for file in files)) | {"config"}
    return names | {f"no{name}" for name in names}


def link_errors(document: Path, target: str) -> list[str]:
    """A link whose file or heading is not there."""
    if re.match(r"https?:", target):
        return []
    name, _, anchor = target.partition("#")
    path = (document.parent / name) if name else document
    if not path.exists():
        return [target]
    return [target] if anchor and anchor not in anchors(path) else []


@functools.cache
def anchors(path: Path) -> set[str]:
    """The headings of a document as GitHub's anchors."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", path.read_text()), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


def import_errors(code: str) -> list[str]:
    """Imports from this package that do not exist."""
    wrong = []
    for module, names in re.findall(
        r"^\s*from (headcount[\w.]*) import (.+)$", code, re.M
    ):
        base = ROOT.joinpath(*module.split(".")[1:])
        file = base.with_suffix(".py") if base != ROOT else ROOT / "__init__.py"
        file = file if file.is_file() else base / "__init__.py"
        text = file.read_text() if file.is_file() else ""
        for name in names.split(", "):
            is_there = re.search(rf"^(def |class |)?{name}\b|^    {name},", text, re.M)
            wrong += [] if is_there or (base / name).is_dir() else [f"{module}.{name}"]
    return wrong


def errors_in(text: str, document: Path) -> list[str]:
    """What a document names that is not there."""
    blocks, prose = FENCED.findall(text), FENCED.sub("", text)
    inline = [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", prose)]
    shell = "\n".join(code for language, code in blocks if language != "python")
    python = "\n".join(code for language, code in blocks if language == "python")
    wrong = import_errors(python)
    for script, arguments in commands_in("\n".join([shell, *inline])):
        wrong += command_errors(script, arguments)
    for quoted in inline:
        wrong += quoted_errors(quoted)
    for target in LINK.findall(prose):
        wrong += link_errors(document, target)
    return wrong + table_errors(prose)


def table_errors(prose: str) -> list[str]:
    """Rows of tables with other numbers of cells than the row above."""
    counts = [
        len(re.findall(r"(?<!\\)\|", line)) if line.lstrip().startswith("|") else 0
        for line in [*prose.splitlines(), ""]
    ]
    return [
        f"a table's row of {now - 1} cells after one of {before - 1}"
        for before, now in zip(counts, counts[1:], strict=False)
        if before and now and before != now
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_keys_paths_and_links_of_a_document_exist(path):
    assert errors_in(path.read_text(), path) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_a_docstring_exist(path):
    text = ast.get_docstring(parsed(path)) or ""
    assert [e for c in commands_in(text) for e in command_errors(*c)] == []


def test_commands_in_the_makefile_exist():
    text = (ROOT / "Makefile").read_text()
    assert [e for c in commands_in(text) for e in command_errors(*c)] == []


def generator(name: str):
    """The module that writes a page."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_of_variants_is_up_to_date():
    generate = generator("generate_variants")
    assert generate.render() == generate.TARGET.read_text(), (
        "run python docs/generate_variants.py"
    )


def test_arms_without_qk_norm_are_compared_with_the_arm_that_only_lacks_it():
    """And QK norm has the verdict on leaving it out, turned round."""
    found = generator("generate_variants").read_verdicts(
        "variants_shakespeare", modern.get_config("short")
    )
    with (ROOT / "results/variants_shakespeare/sweep.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if r["stage"] == "report"]

    def loss_of(arm):
        losses = [
            float(r["dev_loss"]) for r in rows if r["arm"] == arm and r["dev_loss"]
        ]
        return np.array(losses[:8])

    without, clipped = loss_of("qk_norm=False"), loss_of("qk_norm=False, qk_clip=20")
    for name, losses, place in (
        ("QK clip", clipped - without, 1),
        ("QK norm", loss_of("baseline") - without, 0),
    ):
        part = found[name].split(";")[place].replace("−", "-")
        mean, low, high = map(float, re.findall(r"[+-][\d.]+", part))
        assert mean == pytest.approx(losses.mean(), abs=6e-5)
        assert low < mean < high and low + high == pytest.approx(2 * mean, abs=2e-4)
    assert found["QK norm"].startswith("better")


def test_config_reference_is_up_to_date():
    generate = generator("generate")
    assert generate.render() == generate.TARGET.read_text(), (
        "run python docs/generate.py"
    )
    names = {f"{key.section}.{key.name}".lstrip(".") for key in generate.read()[1]}
    sites = {f"model.{site}_attention" for site in ("encoder", "decoder", "cross")}
    assert names == {key for key in KEYS if key.rpartition(".")[0] not in sites}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_every_flag_of_a_script_is_documented(path):
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    mentioned = set(re.findall(r"--(\w+)", text))
    mentioned |= {name.removeprefix("no") for name in mentioned}
    assert set(definitions(path)) - mentioned == set()


def test_every_preset_and_ablation_is_documented():
    training = (ROOT / "docs/guides/python.md").read_text()
    assert [name for name in presets.PRESETS if f"`{name}`" not in training] == []
    sweeps = (ROOT / "docs/guides/sweeps.md").read_text()
    asked = [
        n for n, f in vars(ablations).items() if "Scientific:" in (f.__doc__ or "")
    ]
    names = [name for name in asked if callable(getattr(ablations, name))]
    assert [name for name in names if f"`{name}`" not in sweeps] == []


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("```\npython eval.py --beam_sise=5\n```\n", "--beam_sise"),
        ("```\npython eval.py --seeds=5\n```\n", "--seeds"),  # sweep.py's
        ("```\nx | .venv/bin/python eval.py \\\n  --beam-size=5\n```\n", "--beam-size"),
        ("1. a\n\n   ```\n   python -m benchmarks.merge --size a\n   ```\n", "--size"),
        ("```\npython train.py --config.model.hedas=5\n```\n", "--config.model.hedas"),
        ("```\npython train.py --config.seed=x\n```\n", "--config.seed=x"),
        ("```\npython train.py --config=configs/no.py:a\n```\n", "configs/no.py"),
        (
            "```\npython train.py --config=configs/numbers.py:long\n```\n",
            "configs/numbers.py:long",
        ),
        ("```\npython heads.py discribe --split=val\n```\n", "heads.py discribe"),
        ("```\npython sweep.py run --ablation=hedas\n```\n", "hedas"),
        ("```\npython predict.py --config.seed=1\n```\n", "--config.seed"),
        ("```\npython -m models.describes\n```\n", "models.describes"),
        (
            "```python\nfrom headcount.training.run import lod\n```\n",
            "training.run.lod",
        ),
        ("Say `python sweep.py list\n--ablations=heads`.", "--ablations"),
        ("Say `--config.sees=3`.", "--config.sees"),
        ("Say `model.attention.hedas`.", "model.attention.hedas"),
        ("See `docs/no.md`.", "docs/no.md"),
        ("| a | b |\n| --- | --- |\n| c | | d |\n", "row of 3 cells after one of 2"),
        ("See [there](no.md#part).", "no.md#part"),
        ("See [there](quickstart.md#no-part).", "quickstart.md#no-part"),
    ],
)
def test_a_wrong_document_is_found(text, wrong):
    assert any(wrong in error for error in errors_in(text, ROOT / "docs" / "new.md"))
