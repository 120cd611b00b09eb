"""A corpus, and a sweep that nobody disturbed."""

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
def undisturbed(tmp_path_factory, corpus):
    workdir = tmp_path_factory.mktemp("undisturbed") / "sweep"
    said = finish(sweep("run", workdir, corpus))
    assert "All is done" in said
    return workdir
