"""A corpus, and a sweep that ran without interruption."""

import pytest
from sweep_cases import ABLATIONS, SENTENCES, finish, sweep


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, sentences in (("train", SENTENCES), ("val", SENTENCES[:6])):
        for language in ("en", "de"):
            text = "".join(f"{s}\n" for s in sentences)
            (folder / f"{split}.{language}").write_text(text)
            (folder / f"test.{language}").write_text(text)
    (folder / "ablations.py").write_text(ABLATIONS)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "sweep"
    assert "Everything is done" in finish(sweep("run", workdir, corpus))
    return workdir
