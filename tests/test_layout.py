"""What holds of the tree as a whole."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("analysis", "attention", "configs", "data", "models", "sweeps", "training")
MAY_IMPORT = {
    "configs": set(),
    "data": set(),
    "attention": set(),
    "models": {"attention"},
    "training": {"models", "attention"},
    "analysis": {"models", "attention", "data", "training"},
    "sweeps": {"configs", "data", "models", "attention", "training", "analysis"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names & set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    files = list((ROOT / package).glob("*.py"))
    assert files
    for path in files:
        may = MAY_IMPORT[package] | {package}
        if '__name__ == "__main__"' in path.read_text():  # a script takes a config
            may |= {"configs"}
        assert imported(path) <= may, path


def test_no_file_holds_two_ideas():
    files = [
        *ROOT.glob("*.py"),
        *(f for p in PACKAGES for f in (ROOT / p).glob("*.py")),
    ]
    assert {str(f): n for f in files if (n := f.read_text().count("\n")) > 400} == {}


def test_no_config_key_has_a_hidden_default():
    hidden = re.compile(r"\bconfig(\.\w+)*\.get\(")
    ours = [*ROOT.glob("*.py"), *ROOT.glob("[!.]*/**/*.py")]  # no .venv
    assert len(ours) > 100
    for path in ours:
        assert not hidden.search(path.read_text()), path
