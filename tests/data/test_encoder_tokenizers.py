"""Words by their affixes."""

import numpy as np
import pytest

from headcount.data import encoder_tokenizers
from headcount.data.encoder_tokenizers import AffixTokenizer, make_affixes, shape
from headcount.data.tokenizers import EOS, UNK, load_or_make

TEXTS = ["The walking dog", "a Walking-stick in 2024", "walked dogs"]


def make(folder, vocab_size=1000) -> AffixTokenizer:
    kinds = encoder_tokenizers.KINDS
    return load_or_make(folder, "affixes", TEXTS, vocab_size, kinds)


def names_of(tokenizer, word):
    """Return the names of a word's features, where they are known."""
    (ids,) = tokenizer.features([word])
    return [TableNames(tokenizer)[i] for i in ids]


class TableNames(dict):
    """Unit by id."""

    def __init__(self, tokenizer):
        super().__init__({i: unit for unit, i in tokenizer._ids.items()})

    def __missing__(self, key):
        assert key == UNK
        return "?"


def test_an_unknown_word_has_the_affixes_of_known_ones(tmp_path):
    tokenizer = make(tmp_path)
    assert tokenizer.encode(["talking"], eos=False).tokens.tolist() == [UNK]
    assert names_of(tokenizer, "talking") == [
        "?",
        *("prefix t", "?", "?"),
        *("suffix g", "suffix ng", "suffix ing", "suffix king"),
        "shape a",
    ]
    assert names_of(tokenizer, "Walking")[:2] == ["lower walking", "prefix w"]
    assert names_of(tokenizer, "Walking")[-1] == "shape Aa"


def test_tokens_and_features_are_aligned(tmp_path):
    tokenizer = make(tmp_path)
    ids, features = tokenizer.encode(TEXTS, eos=False), tokenizer.features(TEXTS)
    assert features.shape == (len(ids.tokens), AffixTokenizer.num_features)
    assert tokenizer.encode(TEXTS)[0].tolist() == [*ids[0].tolist(), EOS]
    assert [tokenizer.decode(each) for each in ids] == TEXTS
    again = make(tmp_path)
    np.testing.assert_array_equal(again.features(TEXTS), features)
    assert tokenizer.features([""]).shape == (0, AffixTokenizer.num_features)


def test_the_vocabulary_keeps_the_most_frequent_parts(tmp_path):
    small = make(tmp_path, vocab_size=14)
    assert small.vocab_size == 14
    counts = {}
    for text in TEXTS:
        for word in text.split():
            for part in encoder_tokenizers.parts_of(word):
                counts[part] = counts.get(part, 0) + 1
    assert make_affixes(TEXTS, 14) == make_affixes(TEXTS[::-1], 14)
    kept = [counts[unit] for unit in small.units]
    assert min(kept) >= sorted(counts.values())[-10]
    for size in (3, 4):
        with pytest.raises(ValueError, match=f"data.vocab_size .* 4, .* got {size}"):
            make_affixes(TEXTS, size)


def test_shapes_shorten_runs():
    assert [shape(w) for w in ("McDonald", "U.S.", "3.14", "été", "--")] == [
        "AaAa",
        "A.A.",
        "9.9",
        "a",
        "-",
    ]
