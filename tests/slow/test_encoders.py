"""Encoders from pretraining to head analysis, by the scripts."""

import json

import numpy as np
import pytest

from tests.runs import SMALL, fails, read, run, succeed, training

NOUNS = ("dog", "cat", "bird", "horse", "girl", "boy")
VERBS = ("sees", "walks", "finds", "calls")
ENCODER = SMALL | {
    "data.tokenizer": "affixes",
    "data.vocab_size": 200,
    "data.max_length": 32,
    "model.num_encoder_layers": 2,
    "model.num_decoder_layers": 0,
    "seeds": 1,
}


def sentence(rng):
    nouns = [str(rng.choice(NOUNS)) + "s" * rng.integers(2) for _ in "ab"]
    words = ["the", nouns[0], str(rng.choice(VERBS)), "a", nouns[1]]
    return words, ["DET", "NOUN", "VERB", "DET", "NOUN"]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Documents, tagged words, and texts with labels, of the same sentences."""
    root, rng = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    for name in ("documents", "tagged", "labelled"):
        (root / name).mkdir()
    for split, count in (("train", 150), ("val", 30), ("test", 30)):
        found = [sentence(rng) for _ in range(count)]
        texts = [" ".join(words) for words, _ in found]
        (root / "documents" / f"{split}.txt").write_text("\n\n".join(texts))
        rows = ["\n".join(map("\t".join, zip(*one, strict=True))) for one in found]
        if split == "test":
            rows.append("ouch\tINTJ")
        (root / "tagged" / f"{split}.conll").write_text("\n\n".join(rows) + "\n")
        rows = [f"{'many' if 's' in t.split()[1][-1] else 'one'}\t{t}" for t in texts]
        (root / "labelled" / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def pretrained(corpora):
    """A masked language model of the documents."""
    keys = {"task.name": "masked_language_model", "data.name": "text"}
    keys |= {"data.directory": corpora / "documents"}
    succeed(training(corpora / "masked", "configs/base.py", **ENCODER | keys))
    return corpora / "masked"


def tuned(corpora, pretrained, name, kind, **keys):
    """Fine-tune on a corpus; return the workdir and the log."""
    keys |= {"task.name": name, "data.directory": corpora / kind}
    keys |= {"train.init_from": pretrained, "optimizer.layer_decay": 0.9}
    workdir = corpora / name
    ran = succeed(training(workdir, "configs/base.py", **ENCODER | keys))
    return workdir, ran.stderr


def test_a_tagger_is_fine_tuned_scored_and_analysed(corpora, pretrained):
    keys = {"data.name": "conll", "optimizer.learning_rate": 0.01}
    workdir, log = tuned(corpora, pretrained, "tagging", "tagged", **keys)
    assert "classifier" in log and str(pretrained) in log
    ours, theirs = (
        (folder / "tokenizer" / "affixes.json").read_bytes()
        for folder in (workdir, pretrained)
    )
    assert ours == theirs
    scored = succeed(["eval.py", f"--workdir={workdir}", "--split=test"])
    assert "INTJ" in scored.stderr, "unknown in training, so logged"
    (row,) = read(workdir, "result-test.json")
    assert 0.9 < row["accuracy"] < 1, "all but the interjection"
    assert {each["class"] for each in row["report"]} >= {"NOUN", "INTJ"}
    for shown in ("NOUN", "precision", "most frequent confusions", "macro F1"):
        assert shown in scored.stdout
    answered = succeed(
        ["predict.py", f"--workdir={workdir}"], stdin=b"the horses sees\n\n"
    )
    lines = [line.split("\t") for line in answered.stdout.splitlines()]
    assert [line[:2] for line in lines] == [
        *(["the", "DET"], ["horses", "NOUN"], ["sees", "VERB"]),
        *([""], [""]),
    ]
    for verb in ("describe", "importance", "prune"):
        succeed(["heads.py", verb, f"--workdir={workdir}", "--checkpoint=last"])
        rows = read(workdir, f"heads-{verb}-val-last.json")
        sites = {each.get("site") for each in rows}
        assert sites <= {"encoder", None}, "None: heads of all sites"
        assert rows


def test_a_classifier_is_fine_tuned_and_answers_with_probabilities(corpora, pretrained):
    keys = {"data.name": "labelled", "task.pooling": "attention"}
    workdir, _ = tuned(corpora, pretrained, "classification", "labelled", **keys)
    succeed(["eval.py", f"--workdir={workdir}", "--split=test"])
    (row,) = read(workdir, "result-test.json")
    assert {each["class"] for each in row["report"]} == {"many", "one"}
    answered = succeed(["predict.py", f"--workdir={workdir}"], stdin=b"the dog\n\n")
    for line in answered.stdout.splitlines():
        found = json.loads(line)
        shares = found["probabilities"]
        assert sum(shares.values()) == pytest.approx(1, abs=1e-3)
        assert found["label"] == max(shares, key=shares.get)
    filled = succeed(["predict.py", f"--workdir={pretrained}"], stdin=b"the [MASK] a\n")
    assert len(json.loads(filled.stdout)[0]) == 5


def test_a_line_without_a_tag_ends_training_with_its_number(corpora, tmp_path):
    keys = {"task.name": "tagging", "data.name": "conll", "data.directory": tmp_path}
    for name in ("train", "val"):
        (tmp_path / f"{name}.conll").write_text("a\tDET\n\nwalks\n")
    ran = run(training(tmp_path / "run", "configs/base.py", **ENCODER | keys))
    fails(ran, "train.conll, line 3")
