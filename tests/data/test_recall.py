"""Associative recall: what is asked can be answered, and nothing else is scored."""

import numpy as np
import pytest

from headcount.data import recall


@pytest.mark.parametrize("length, vocab_size", [(16, 44), (4, 6), (64, 68)])
def test_every_scored_word_follows_from_the_pairs_before_it(length, vocab_size):
    scored = recall.is_scored(length)
    assert scored.sum() == length // 4 and not scored[: length // 2].any()
    for text in recall.documents("val", length, vocab_size):
        words = text.split()
        assert len(words) == length
        table = dict(
            zip(words[: length // 2 : 2], words[1 : length // 2 : 2], strict=True)
        )
        assert len(table) == length // 4  # no key twice
        keys = [words[i - 1] for i in np.flatnonzero(scored)]
        values = [words[i] for i in np.flatnonzero(scored)]
        assert sorted(keys) == sorted(table)
        assert values == [table[key] for key in keys]


def test_a_value_cannot_be_guessed_from_its_place_or_key():
    """A guess is as likely as any other: values and orders are uniform."""
    documents = [text.split() for text in recall.documents("test", 16, 24)]
    asked = np.array([[int(word[1:]) for word in words] for words in documents])
    counts = np.bincount(asked[:, 9], minlength=10)  # the first scored word
    assert counts.sum() == 1000
    assert abs(counts - 100).max() < 5 * np.sqrt(90)  # binomial, of 10 values
    first = (asked[:, 8] == asked[:, 0]).mean()  # the first key is asked first
    assert abs(first - 1 / 4) < 5 * np.sqrt(3 / 16 / 1000)


def test_splits_have_their_sizes_and_no_document_in_common():
    splits = {name: recall.documents(name, 16, 44) for name in recall.SIZES}
    assert {name: len(texts) for name, texts in splits.items()} == recall.SIZES
    texts = [text for split in splits.values() for text in split]
    assert len(set(texts)) == len(texts)


def test_the_vocabulary_has_every_word_of_the_documents():
    words = recall.vocabulary(44)
    assert len(words) == len(set(words)) == 44 - recall.SPECIAL
    used = {w for text in recall.documents("train", 16, 44) for w in text.split()}
    assert used == set(words)


@pytest.mark.parametrize(
    "split, length, vocab_size, culprit",
    [
        ("dev", 16, 44, "'dev'.*train, val, test"),
        ("val", 18, 44, "data.max_length .* 18"),
        ("val", 0, 44, "data.max_length .* 0"),
        ("val", 16, 10**8, "data.vocab_size must be at most 16384 .* 100000000"),
        ("val", 64, 34, "data.vocab_size must be at least 36 .*data.max_length=64"),
    ],
)
def test_sizes_that_do_not_fit_raise_with_their_key(split, length, vocab_size, culprit):
    with pytest.raises(ValueError, match=culprit):
        recall.documents(split, length, vocab_size)
