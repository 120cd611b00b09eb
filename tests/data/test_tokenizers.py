import logging
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.data import multi30k, numbers, tokenizer

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = {
    language: numbers.phrases(range(0, 900_000, 3001), language)
    for language in ("en", "de")
}


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return tokenizer.load_or_train(folder, PAIRS["en"], PAIRS["de"], 200)[0]


def test_special_ids(joint):
    assert (tokenizer.PAD, tokenizer.BOS, tokenizer.EOS, tokenizer.UNK) == (0, 1, 2, 3)
    assert list(joint.encode([""])[0]) == [2]
    assert list(joint.encode(["§"])[0])[-2:] == [3, 2]
    assert joint.vocab_size == 200


def test_decoding_reverses_encoding(joint):
    for sentences in PAIRS.values():
        encoded = joint.encode(sentences)
        assert joint.decode_many(encoded) == sentences
        assert all(ids[-1] == 2 and 2 not in ids[:-1] for ids in encoded)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(PAIRS["en"][7].split()), min_size=1))
def test_any_words_of_the_alphabet_round_trip(joint, words):
    sentence = " ".join(words)
    ids = list(joint.encode([sentence])[0])
    assert joint.decode([1, *ids, 0, 0]) == sentence
    assert joint.decode([*ids, *ids]) == sentence  # what follows eos is no text


def test_many_sentences_encode_as_one_by_one(joint):
    many = joint.encode(PAIRS["de"])
    for i, sentence in enumerate(PAIRS["de"]):
        assert list(many[i]) == list(joint.encode([sentence])[0])


def test_case_is_kept():
    text = ["Ein Mann", "ein Hund"]
    model = tokenizer.Tokenizer(tokenizer.train(text, 30))
    assert model.decode_many(model.encode(text)) == text


def test_the_same_text_gives_the_same_model():
    assert tokenizer.train(PAIRS["en"], 120) == tokenizer.train(PAIRS["en"], 120)
    assert tokenizer.train(PAIRS["en"], 120) != tokenizer.train(PAIRS["de"], 120)


def test_a_vocabulary_larger_than_the_corpus_supports_is_cut_and_logged(caplog):
    ten = PAIRS["en"][:10]
    with caplog.at_level(logging.WARNING):
        model = tokenizer.Tokenizer(tokenizer.train(ten, 10_000))
    assert f"supports a vocabulary of {model.vocab_size}, not 10000" in caplog.text
    assert model.decode_many(model.encode(ten)) == ten


def test_a_vocabulary_smaller_than_the_alphabet_is_refused():
    with pytest.raises(ValueError, match="data.vocab_size=10: the text needs about"):
        tokenizer.train(PAIRS["en"], 10)


def test_pieces_name_every_token(joint):
    ids = joint.encode(["forty-five"])[0]
    pieces = joint.pieces(ids)
    assert len(pieces) == len(ids) and pieces[-1] == "</s>"
    assert "".join(pieces[:-1]) == "\u2581forty-five"  # the space before a word


def test_no_text_is_refused():
    with pytest.raises(ValueError, match="every line is empty"):
        tokenizer.train(["", "  "], 100)


def test_separate_vocabularies_know_their_own_language_only(tmp_path):
    english, german = ["one two three"] * 3, ["fünf sechs"] * 3
    sides = tokenizer.load_or_train(tmp_path, english, german, 20, joint=False)
    assert tokenizer.UNK in sides[0].encode(["fünf"])[0]
    assert tokenizer.UNK not in sides[1].encode(["fünf"])[0]
    for loaded, side in zip(tokenizer.load(tmp_path), sides, strict=True):
        assert loaded.vocab_size == side.vocab_size
        assert list(loaded.encode(["fünf"])[0]) == list(side.encode(["fünf"])[0])


def test_a_kept_model_is_used_again(tmp_path):
    first, _ = tokenizer.load_or_train(tmp_path, PAIRS["en"], PAIRS["de"], 100)
    again, _ = tokenizer.load_or_train(tmp_path, ["other text"], ["anderes"], 50)
    texts = [model.encode(PAIRS["en"]) for model in (first, again)]
    assert list(texts[0].tokens) == list(texts[1].tokens)


def test_no_model_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no tokenizer in {tmp_path}"):
        tokenizer.load(tmp_path)


def test_only_what_was_written_is_forgotten(tmp_path):
    tokenizer.load_or_train(tmp_path, ["a b"], ["b c"], 10, joint=False)
    tokenizer.load_or_train(tmp_path / "joint", ["a b"], ["b c"], 10)
    (tmp_path / "my.model").write_text("precious")
    for folder in (tmp_path, tmp_path / "joint"):
        tokenizer.forget(folder)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["my.model"]


@pytest.mark.parametrize("length", [0, 50])
def test_a_damaged_model_is_named(tmp_path, length):
    tokenizer.load_or_train(tmp_path, PAIRS["en"], PAIRS["de"], 100)
    path = tmp_path / "joint.model"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="joint.model is damaged"):
        tokenizer.load(tmp_path)
    path.unlink()
    for name in ("source.model", "target.model", "vocab.json"):
        (tmp_path / name).write_text("{")
    for text in ("{", "[" * 10**5):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(ValueError, match="vocab.json is damaged"):
            tokenizer.load(tmp_path)


def test_killed_while_writing_leaves_all_of_a_model_or_none(tmp_path):
    code = (
        "import sys, pathlib; from data import tokenizer\n"
        "path, content = pathlib.Path(sys.argv[1]), bytes(3_000_000)\n"
        "print('ready', flush=True)\n"
        "while True: tokenizer._write(path, content)"
    )
    path = tmp_path / "joint.model"
    for delay in (0.0, 0.004, 0.011, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, path], cwd=ROOT, stdout=subprocess.PIPE
        )
        with writer:
            writer.stdout.readline()
            time.sleep(delay)
            os.kill(writer.pid, signal.SIGKILL)
        assert not path.exists() or path.stat().st_size == 3_000_000


def test_others_may_read_what_is_written_if_the_umask_lets_them(tmp_path, monkeypatch):
    """A colleague who scores a run, or begins with it, or shares the downloads."""
    monkeypatch.setattr(multi30k, "_download", lambda url: b"a dog\n")
    monkeypatch.setattr(multi30k, "_checked_lines", lambda name, content, where: [])
    before = os.umask(0o027)
    try:
        tokenizer.load_or_train(tmp_path / "a", ["a b c"], ["d e f"], 20, joint=False)
        tokenizer.copy(tmp_path / "a", tmp_path / "b")
        multi30k._from_network("tok", "val.en", tmp_path / "cache")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
