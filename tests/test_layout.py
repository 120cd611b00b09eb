"""What holds for the source tree as a whole."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.processes import with_devices

ROOT = Path(__file__).resolve().parent.parent
# Upper rooms first; a room imports only from those below it, but sweeps not from
# exchange. The last four import none of the others and not each other, except for the
# checks of config values.
ROOMS = ("sweeps", "exchange", "analysis", "training", "tasks", "decoding", "models")
BASE = ("attention", "data", "configs", "runtime")
OF_A_TASK = re.compile("bleu|translat|_source|source_|_target|target_(?!config)", re.I)
# Modules that a script imports only when they are used.
LATE = {
    "sweep": {"scipy.stats", "orbax.checkpoint", "optuna", "ray"},
    "heads": {"scipy.stats"},
    "predict": {"scipy.stats", "matplotlib"},
}
MAY_IMPORT = {
    room: {*ROOMS[index + 1 :], *BASE} for index, room in enumerate(ROOMS)
} | {room: set() for room in BASE}
MAY_IMPORT["sweeps"].remove("exchange")


def imports(path: Path) -> set[str]:
    """Return the rooms that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            first, *rest = name.split(".")
            if first == "headcount" and rest:
                found.add(rest[0])
    return found & {*ROOMS, *BASE}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_go_one_way(room):
    files = list((ROOT / room).rglob("*.py"))
    assert files
    wrong = {
        str(path.relative_to(ROOT)): sorted(imports(path) - MAY_IMPORT[room] - {room})
        for path in files
    }
    assert {path: names for path, names in wrong.items() if names} == {}


def test_attention_imports_no_other_room_and_no_flax():
    """It can be installed with jax and jaxtyping alone."""
    for path in (ROOT / "attention").rglob("*.py"):
        text = path.read_text()
        assert not re.search(
            r"^\s*(from|import) (flax|optax|ml_collections)", text, re.M
        )


@pytest.mark.slow
@pytest.mark.parametrize("script, late", LATE.items())
def test_scripts_start_without_what_only_some_verbs_need(script, late):
    """Each of these takes a second or more to import."""
    code = f"import sys, headcount.{script}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=with_devices(1),
        capture_output=True,
        text=True,
        check=True,
    )
    assert late.isdisjoint(done.stdout.split())


def test_every_package_is_listed_for_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    folders = {
        path.parent for room in MAY_IMPORT for path in (ROOT / room).rglob("*.py")
    }
    names = {".".join(("headcount", *f.relative_to(ROOT).parts)) for f in folders}
    assert listed == names | {"headcount"}


@pytest.mark.parametrize("room", ["training", "sweeps", "runtime"])
def test_a_room_knows_no_task_by_name(room):
    """Scores and fields belong to the tasks."""
    found = []
    for path in (ROOT / room).rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if OF_A_TASK.search(line):
                found.append(f"{path.name}:{number}: {line.strip()}")
    assert found == []


def test_no_config_key_has_a_hidden_default():
    hidden = re.compile(r"\bconfig(\.\w+)*\.get\(")
    ours = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]  # no .venv
    assert len(ours) > 100
    for path in ours:
        assert not hidden.search(path.read_text()), path
