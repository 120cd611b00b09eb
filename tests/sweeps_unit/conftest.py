"""A corpus for sweeps that are never trained."""

import pytest
from sweep_fakes import write_corpus


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")
