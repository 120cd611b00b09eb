"""A corpus, and a sweep that ran without interruption."""

import pytest
from sweep_cases import ABLATIONS, SENTENCES, finish, sweep


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for split, sentences in (("train", SENTENCES), ("val", SENTENCES[:6])):
        text = "".join(f"{s}\n" for s in sentences)
        for suffix in ("en", "de", "txt"):  # of a translator and of a language model
            (folder / f"{split}.{suffix}").write_text(text)
            (folder / f"test.{suffix}").write_text(text)
    (folder / "ablations.py").write_text(ABLATIONS)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("uninterrupted") / "sweep"
    assert "Everything is done" in finish(sweep("run", workdir, corpus))
    return workdir
