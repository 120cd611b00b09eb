"""Tokenizers: round trips, files, and what is in them."""

import io
import logging
import os
import pathlib
import signal
import stat
import subprocess
import sys
import time
import urllib.request

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount.data import multi30k, numbers, tokenizers
from headcount.data.tokenizers import (
    KINDS,
    SentencePieceTokenizer,
    copy_gpt2,
    load_or_make,
    load_or_train_pair,
    train_on_documents,
    train_sentencepiece,
)

ROOT = pathlib.Path(__file__).parents[2]
PAIRS = {
    language: numbers.phrases(range(0, 900_000, 3001), language)
    for language in ("en", "de")
}


@pytest.fixture(scope="module")
def joint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    return load_or_train_pair(folder, PAIRS["en"], PAIRS["de"], 200, joint=True)[0]


def test_special_ids(joint):
    assert (tokenizers.PAD, tokenizers.BOS, tokenizers.EOS, tokenizers.UNK) == (
        0,
        1,
        2,
        3,
    )
    assert list(joint.encode([""])[0]) == [2]
    assert list(joint.encode(["§"])[0])[-2:] == [3, 2]
    assert joint.vocab_size == 200


def test_decoding_reverses_encoding(joint):
    for sentences in PAIRS.values():
        encoded = joint.encode(sentences)
        assert [joint.decode(ids) for ids in encoded] == sentences
        assert all(ids[-1] == 2 and 2 not in ids[:-1] for ids in encoded)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(PAIRS["en"][7].split()), min_size=1))
def test_words_of_the_alphabet_round_trip_up_to_eos(joint, words):
    sentence = " ".join(words)
    ids = list(joint.encode([sentence])[0])
    assert joint.decode([1, *ids, 0, 0]) == sentence
    assert joint.decode([*ids, *ids]) == sentence  # what follows eos is no text


def test_a_list_encodes_as_its_sentences_one_by_one(joint):
    many = joint.encode(PAIRS["de"])
    for i, sentence in enumerate(PAIRS["de"]):
        assert list(many[i]) == list(joint.encode([sentence])[0])


def test_case_is_kept():
    text = ["Ein Mann", "ein Hund"]
    model = SentencePieceTokenizer(train_sentencepiece(text, 30))
    assert [model.decode(ids) for ids in model.encode(text)] == text


def test_a_model_of_documents_keeps_white_space_and_unicode():
    code = "def f(x):\n    return\tx  # ﬁne ½\n\n"
    model = SentencePieceTokenizer(train_on_documents([code, "x = 1\n"], 60))
    assert [model.decode(ids) for ids in model.encode([code])] == [code]
    (newline,) = model.encode(["\n"], eos=False)[0]
    assert model.pieces([newline]) == ["\n"]


def test_the_same_text_gives_the_same_model():
    assert train_sentencepiece(PAIRS["en"], 120) == train_sentencepiece(
        PAIRS["en"], 120
    )
    assert train_sentencepiece(PAIRS["en"], 120) != train_sentencepiece(
        PAIRS["de"], 120
    )


def test_a_vocabulary_larger_than_the_corpus_supports_is_reduced_and_logged(caplog):
    ten = PAIRS["en"][:10]
    with caplog.at_level(logging.WARNING):
        model = SentencePieceTokenizer(train_sentencepiece(ten, 10_000))
    assert f"supports a vocabulary of {model.vocab_size}, not 10000" in caplog.text
    assert [model.decode(ids) for ids in model.encode(ten)] == ten


def test_a_vocabulary_smaller_than_the_alphabet_raises():
    with pytest.raises(ValueError, match="data.vocab_size=10:"):
        train_sentencepiece(PAIRS["en"], 10)


def test_pieces_of_every_token_including_eos(joint):
    ids = joint.encode(["forty-five"])[0]
    pieces = joint.pieces(ids)
    assert len(pieces) == len(ids) and pieces[-1] == "</s>"
    assert "".join(pieces[:-1]) == "\u2581forty-five"  # the space before a word


def test_training_on_no_text_raises():
    with pytest.raises(ValueError, match="every line is empty"):
        train_sentencepiece(["", "  "], 100)


def test_separate_vocabularies_have_only_their_own_language(tmp_path):
    english, german = ["one two three"] * 3, ["fünf sechs"] * 3
    sides = load_or_train_pair(tmp_path, english, german, 20, joint=False)
    assert tokenizers.UNK in sides[0].encode(["fünf"])[0]
    assert tokenizers.UNK not in sides[1].encode(["fünf"])[0]
    for loaded, side in zip(tokenizers.load_pair(tmp_path), sides, strict=True):
        assert loaded.vocab_size == side.vocab_size
        assert list(loaded.encode(["fünf"])[0]) == list(side.encode(["fünf"])[0])


def test_an_existing_model_is_loaded_instead_of_trained(tmp_path):
    first, _ = load_or_train_pair(tmp_path, PAIRS["en"], PAIRS["de"], 100, joint=True)
    again, _ = load_or_train_pair(tmp_path, ["other text"], ["anderes"], 50, joint=True)
    texts = [model.encode(PAIRS["en"]) for model in (first, again)]
    assert list(texts[0].tokens) == list(texts[1].tokens)


def test_a_missing_model_raises_with_the_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no tokenizer in {tmp_path}"):
        tokenizers.load_pair(tmp_path)


def test_remove_keeps_files_of_others(tmp_path):
    load_or_train_pair(tmp_path, ["a b"], ["b c"], 10, joint=False)
    load_or_train_pair(tmp_path / "joint", ["a b"], ["b c"], 10, joint=True)
    (tmp_path / "my.model").write_text("precious")
    for folder in (tmp_path, tmp_path / "joint"):
        tokenizers.remove(folder)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["my.model"]


@pytest.mark.parametrize("length", [0, 50])
def test_a_damaged_model_raises_with_its_name(tmp_path, length):
    load_or_train_pair(tmp_path, PAIRS["en"], PAIRS["de"], 100, joint=True)
    path = tmp_path / "joint.model"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match="joint.model is damaged"):
        tokenizers.load_pair(tmp_path)
    path.unlink()
    for name in ("source.model", "target.model", "vocab.json"):
        (tmp_path / name).write_text("{")
    for text in ("{", "[" * 10**5):
        (tmp_path / "vocab.json").write_text(text)
        with pytest.raises(ValueError, match="vocab.json is damaged"):
            tokenizers.load_pair(tmp_path)


def test_a_model_is_written_completely_or_not_at_all_if_killed(tmp_path):
    code = (
        "import sys, pathlib; from headcount.data import tokenizers\n"
        "path, content = pathlib.Path(sys.argv[1]), bytes(3_000_000)\n"
        "print('ready', flush=True)\n"
        "while True: tokenizers.write(path, content)"
    )
    path = tmp_path / "joint.model"
    for delay in (0.0, 0.004, 0.011, 0.05):
        writer = subprocess.Popen(
            [sys.executable, "-c", code, path], cwd=ROOT, stdout=subprocess.PIPE
        )
        with writer:
            writer.stdout.readline()
            time.sleep(delay)
            while delay == 0.05 and not path.exists() and writer.poll() is None:
                time.sleep(0.01)
            os.kill(writer.pid, signal.SIGKILL)
        assert not path.exists() or path.stat().st_size == 3_000_000
    assert path.exists()


def test_files_have_the_permissions_of_the_umask(tmp_path, monkeypatch):
    """Colleagues score a run, start from it, or share the downloads."""
    published = lambda url, timeout: io.BytesIO(b"a dog\n")  # noqa: E731
    monkeypatch.setattr(urllib.request, "urlopen", published)
    monkeypatch.setattr(multi30k, "_checked_lines", lambda name, path: [])
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "cache"))
    before = os.umask(0o027)
    try:
        load_or_train_pair(tmp_path / "a", ["a b c"], ["d e f"], 20, joint=False)
        tokenizers.copy(tmp_path / "a", tmp_path / "b")
        multi30k.tokenized("en", "val")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}


def test_vocabularies_are_equal_exactly_if_they_can_share_an_embedding(tmp_path):
    english, german = PAIRS["en"], PAIRS["de"]
    joint = load_or_train_pair(tmp_path / "a", english, german, 100, joint=True)
    assert tokenizers.pair_vocab_sizes(joint) == [100]
    apart = load_or_train_pair(tmp_path / "b", english, german, 100, joint=False)
    assert tokenizers.pair_vocab_sizes(apart) == [100, 100]


TEXTS = ["to be\nor not", "naïve Größe – 日本 🙂", " two  blanks "]


def made(folder, kind, vocab_size=80):
    return load_or_make(folder, kind, TEXTS, vocab_size)


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_characters_and_bytes_round_trip_any_white_space(tmp_path, kind):
    tokenizer = made(tmp_path, kind)
    encoded = tokenizer.encode(TEXTS)
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
    size = {"characters": len, "bytes": lambda text: len(text.encode())}[kind]
    assert encoded.lengths.tolist() == [size(text) + 1 for text in TEXTS]


def test_byte_ids_are_those_of_utf8_after_the_special_ids(tmp_path):
    tokenizer = made(tmp_path, "bytes")
    ids = tokenizer.encode(["é🙂"])[0].tolist()
    assert ids == [4 + byte for byte in "é🙂".encode()] + [tokenizers.EOS]
    assert tokenizer.vocab_size == 260
    assert tokenizer.decode(ids[:1]) == "\ufffd"  # half a character
    assert not list(tmp_path.iterdir())  # there is nothing to learn or to save


def test_words_are_split_at_white_space(tmp_path):
    tokenizer = made(tmp_path, "words")
    ids = tokenizer.encode(["be  or\nto", "be seen"])
    assert [tokenizer.decode(each) for each in ids] == ["be or to", "be <unk>"]
    assert ids[1].tolist()[-2:] == [tokenizers.UNK, tokenizers.EOS]
    words = sorted({word for text in TEXTS for word in text.split()})
    assert tokenizer.pieces(range(4, tokenizer.vocab_size)) == words


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "words", "bytes"])
def test_tokenizers_of_documents_agree_on_special_ids(tmp_path, kind):
    tokenizer = made(tmp_path, kind)
    with_eos, without = (tokenizer.encode(TEXTS, eos=eos) for eos in (True, False))
    for one, other in zip(with_eos, without, strict=True):
        assert one.tolist() == [*other.tolist(), tokenizers.EOS]
        assert not set(other.tolist()) & {tokenizers.PAD, tokenizers.BOS}
    ids = [tokenizers.BOS, *with_eos[0].tolist(), tokenizers.PAD, 7]
    assert tokenizer.decode(ids) == tokenizer.decode(without[0])
    assert tokenizer.pieces([2]) == ["</s>"]
    assert max(with_eos.tokens) < tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "words"])
def test_a_tokenizer_of_documents_is_made_once_and_then_loaded(tmp_path, kind):
    with pytest.raises(FileNotFoundError, match=KINDS[kind][0]):
        load_or_make(tmp_path, kind, None, 80)
    first = made(tmp_path, kind)
    again = load_or_make(tmp_path, kind, ["quite another text"], 30)
    assert again.vocabulary == first.vocabulary
    loaded = load_or_make(tmp_path, kind, None, 0)
    assert loaded.encode(TEXTS).tokens.tolist() == first.encode(TEXTS).tokens.tolist()
    tokenizers.copy(tmp_path, tmp_path / "copy")
    copied = load_or_make(tmp_path / "copy", kind, None, 0)
    assert copied.vocabulary == first.vocabulary


@pytest.mark.parametrize("kind", ["sentencepiece", "characters", "words", "gpt2"])
@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', "[1]", "[" * 10**5])
def test_a_damaged_tokenizer_of_documents_raises_with_its_name(tmp_path, kind, content):
    if kind == "gpt2":
        pytest.importorskip("tokenizers")
    name = KINDS[kind][0]
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        load_or_make(tmp_path, kind, TEXTS, 80)


def write_byte_level_bpe(folder):
    """Train a small byte-level BPE with GPT-2's end of text; write tokenizer.json."""
    library = pytest.importorskip("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def test_gpt2_ids_are_those_of_the_tokenizers_library(tmp_path):
    theirs = write_byte_level_bpe(tmp_path)
    ours = load_or_make(tmp_path, "gpt2", None, 0)
    end = theirs.token_to_id("<|endoftext|>")
    wanted = [[*each.ids, end] for each in theirs.encode_batch(TEXTS)]
    assert [ids.tolist() for ids in ours.encode(TEXTS)] == wanted
    assert [ours.decode(ids) for ids in [[*ids, 5] for ids in wanted]] == TEXTS
    assert ours.vocab_size == theirs.get_vocab_size()
    assert ours.pieces(wanted[0])[-1] == "<|endoftext|>"
    # transformers saves these as they were last
    theirs.enable_truncation(2)
    theirs.enable_padding(length=9)
    theirs.save(str(tmp_path / "tokenizer.json"))
    again = load_or_make(tmp_path, "gpt2", None, 0)
    assert [ids.tolist() for ids in again.encode(TEXTS)] == wanted


def test_gpt2s_own_tokenizer_comes_from_the_folder_of_the_texts(tmp_path):
    folder, run = tmp_path / "texts", tmp_path / "run"
    folder.mkdir()
    path = folder / "tokenizer.json"
    copy_gpt2(path, run, 1)
    assert not run.exists(), "there is none"
    theirs = write_byte_level_bpe(folder)
    end = theirs.token_to_id("<|endoftext|>")
    with pytest.raises(ValueError, match=rf"model.bos must be {end}, .*got {end + 1}"):
        copy_gpt2(path, run, end + 1)
    copy_gpt2(path, run, end)
    assert (run / "tokenizer.json").read_bytes() == path.read_bytes()
    path.write_text("{}")
    copy_gpt2(path, run, end)  # has one
    assert load_or_make(run, "gpt2", None, 0).bos == end


def test_a_tokenizer_of_another_kind_is_not_gpt2s(tmp_path):
    library = pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    library.Tokenizer(library.models.BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(ValueError, match="tokenizer.json has no token <.endoftext.>"):
        copy_gpt2(path, tmp_path / "run", 0)


def test_gpt2_without_its_file_raises_with_the_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_or_make(tmp_path, "gpt2", TEXTS, 80)


def marian():
    """Make Marian's tokenizer of a small model, with ids in an order of its own."""
    model = train_sentencepiece(["the cat"] * 3, 30)
    ours = SentencePieceTokenizer(model)
    pieces = ours.pieces(range(tokenizers.NUM_SPECIAL, ours.vocab_size))
    names = [*pieces[::-1], "</s>", ">>fra<<", "<unk>", "<pad>"]
    vocabulary = {name: number for number, name in enumerate(names)}
    return tokenizers.MarianTokenizer(model, vocabulary), vocabulary


def test_marian_ids_follow_its_vocabulary_and_our_special_ids():
    tokenizer, vocabulary = marian()
    order = tokenizers.marian_order(vocabulary)
    assert sorted(order) == list(range(len(vocabulary)))
    special = [vocabulary[name] for name in ("<pad>", "</s>", "<unk>")]
    assert order[: len(special)] == special  # our ids 1, 2 and 3
    names = {number: name for name, number in vocabulary.items()}
    ids = tokenizer.encode(["the cat"])[0].tolist()
    assert [names[order[i - 1]] for i in ids] == tokenizer.pieces(ids)
    assert tokenizer.decode(ids) == "the cat" and ids[-1] == tokenizers.EOS


def test_marian_reads_a_language_code_as_one_token():
    tokenizer, _ = marian()
    plain, coded = tokenizer.encode(["the cat", ">>fra<<the cat"])
    assert coded.tolist()[1:] == plain.tolist()
    assert tokenizer.pieces(coded)[0] == ">>fra<<"
    assert tokenizer.encode([">>xyz<<the"])[0][0] == tokenizers.UNK


@pytest.mark.parametrize(
    "change, culprit",
    [
        ({"</s>": None}, "</s>"),
        ({"<pad>": 99}, "vocab.json"),
        ({"<pad>": 0}, "vocab.json"),
    ],
)
def test_a_malformed_vocabulary_of_marian_raises(change, culprit):
    _, vocabulary = marian()
    changed = {k: v for k, v in (vocabulary | change).items() if v is not None}
    with pytest.raises(ValueError, match=culprit):
        tokenizers.marian_order(changed)
