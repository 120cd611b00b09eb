"""A corpus for sweeps that are never trained, and reports without figures."""

import pytest
from sweep_fakes import write_corpus

from headcount.sweeps import report


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def figures():
    """Let a test's reports draw figures, which take half of their time."""


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """Draw no figures unless a test asks for them."""
    if "figures" not in request.fixturenames:
        monkeypatch.setattr(report, "make_figures", lambda _: {})
