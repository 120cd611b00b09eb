"""A run that is loaded: which texts it reads, by which vocabulary, and their scores."""

from types import SimpleNamespace

import pytest
from tests.test_scores import MULTI30K, needs_multi30k
from tests.test_train import write_corpus

from headcount.configs.base import get_config
from headcount.data import corpora
from headcount.runtime.workdir import write_json
from headcount.tasks.scores import published_scores
from headcount.training import run as trained
from headcount.training.run import Trained, read, scored


def run_of(name, directory):
    """A run without a model, whose vocabularies say whose they are."""
    config = get_config()
    config.data.name, config.data.directory = name, str(directory)
    sides = tuple(
        SimpleNamespace(
            encode=lambda lines, side=side: [f"{side}: {line}" for line in lines],
            decode_many=lambda texts, side=side: [f"{text}, {side}" for text in texts],
        )
        for side in ("source", "target")
    )
    given = dict.fromkeys(Trained._fields)
    given |= {"head_gates": {}, "params": {}, "step": [1]}
    return Trained(**given | {"config": config, "tokenizers": sides})


def test_a_folder_that_is_named_is_read(tmp_path):
    write_corpus(tmp_path / "own", ["a"], ["b"])
    write_corpus(tmp_path / "other", ["c"], ["d"])
    run = run_of("text", tmp_path / "own")
    for folder, texts in ((None, ["a", "b"]), (str(tmp_path / "other"), ["c", "d"])):
        pairs = read(run, "val", folder)
        assert [*pairs.sources, *pairs.references] == texts
        encoded = [*pairs.source, *pairs.target]
        assert encoded == [f"source: {texts[0]}", f"target: {texts[1]}"]


def test_lines_are_of_the_source_and_translations_of_the_target(monkeypatch):
    monkeypatch.setattr(trained, "sentences", lambda encoded: encoded)
    said = []

    def translate(graph, params, chosen, **options):
        said.extend(chosen)
        return ["a"], None

    monkeypatch.setattr(trained, "translate", translate)
    assert run_of("text", "nowhere").translate(["b"]) == ["a, target"]
    assert said == ["source: b"]


def test_what_a_run_cannot_read_is_said():
    run = run_of("text", "nowhere")
    for trial in (1, -1):  # which an array would take for another
        with pytest.raises(ValueError, match=f"trial must be from 0 to 0, got {trial}"):
            run.of(trial)
    for call in (
        lambda: run.translate("a"),
        lambda: run.score("a", ["b"]),
        lambda: run.score(["a"], "b"),
    ):
        with pytest.raises(TypeError, match="must be a list of sentences, as in"):
            call()
    with pytest.raises(ValueError, match="each source needs a target, got 2 and 1"):
        run.score(["a", "b"], ["c"])


@needs_multi30k
def test_multi30k_is_scored_against_its_references_as_published():
    """Those of the target language, by whose rules translations are tokenised."""
    run = run_of("multi30k", MULTI30K)
    pairs = read(run, "val")
    wanted = corpora.tokenized_references("multi30k", "de", "val", MULTI30K)
    assert pairs.tokenized == wanted
    said = [line.replace("Hund", "Kater") for line in pairs.references]
    found = scored(run, pairs, said)
    german, english = (published_scores(said, wanted, name) for name in ("de", "en"))
    assert german != english and found | german == found


def test_a_key_that_the_model_lacks_is_named(tmp_path, monkeypatch):
    """As of a newer version's run."""
    config = get_config().to_dict()
    config["model"]["attention"]["num_hedas"] = 2
    write_json(tmp_path / "config.json", config)
    monkeypatch.setattr(trained.tokenizer, "load", lambda path: ())
    monkeypatch.setattr(trained.tokenizer, "vocab_sizes", lambda tokenizers: [60])
    sentence = "config.json is of another version .* argument 'num_hedas'.$"
    with pytest.raises(ValueError, match=sentence):
        trained.load(tmp_path)
