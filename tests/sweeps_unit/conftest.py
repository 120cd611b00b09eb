"""A corpus for sweeps that are never trained, and reports without figures."""

import pytest
from sweep_fakes import write_corpus

from headcount.sweeps import report


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(autouse=True)
def no_figures(request, monkeypatch):
    """Draw figures, half of a report's time, only where they are tested."""
    if "report" not in request.module.__name__:
        monkeypatch.setattr(report, "make_figures", lambda _: {})
