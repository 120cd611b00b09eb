"""Texts with labels: TSV files, and the folds of Movie Reviews."""

from pathlib import Path

import pytest

from headcount.configs.validation import check_values
from headcount.data import labelled
from headcount.data.labelled import load

REVIEWS = Path(__file__).resolve().parents[3] / "shared/data/movie_reviews"
needs_reviews = pytest.mark.skipif(
    not REVIEWS.is_dir(), reason="Movie Reviews are not beside the project"
)


def load_tsv(folder, split="train"):
    return load("labelled", split, str(folder), 0)


def write_reviews(folder, count=25):
    for label, name in labelled.REVIEWS.items():
        lines = [f"{label} café {i} " for i in range(count)]
        (folder / name).write_bytes("\n".join([*lines, ""]).encode("latin-1"))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_a_tsv_file_has_label_and_text(tmp_path, ending):
    lines = ["pos\tgood – really", " neg \tbad", "pos\t"]
    (tmp_path / "train.tsv").write_bytes(ending.join([*lines, ""]).encode())
    found = load_tsv(tmp_path)
    assert found.labels == ["pos", "neg", "pos"]
    assert found.texts == [("good – really",), ("bad",), ("",)]


def test_a_tsv_file_may_have_pairs_of_texts(tmp_path):
    (tmp_path / "dev.tsv").write_text("yes\ta b\tc\nno\td\te f")
    found = load_tsv(tmp_path, "val")
    assert found.labels == ["yes", "no"]
    assert found.texts == [("a b", "c"), ("d", "e f")]


@pytest.mark.parametrize(
    "content, culprit",
    [
        ("a\tb\nc\n", "train.tsv, line 2, has 1 "),
        ("a\tb\n\nc\td\n", "train.tsv, line 2, "),
        ("a\tb\tc\td\n", "train.tsv, line 1, has 4 "),
        ("\tb\n", "train.tsv, line 1, has no label"),
        ("a\tb\na\tb\tc\n", "train.tsv has lines with one text and lines with two"),
        ("", "'train' of labelled"),
    ],
)
def test_a_malformed_tsv_raises_with_file_and_line(tmp_path, content, culprit):
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(ValueError, match=culprit):
        load_tsv(tmp_path)


def test_a_corpus_that_is_not_known_is_named(tmp_path):
    with pytest.raises(ValueError, match="data.name.* movie_reviews .*'movie_review'"):
        load("movie_review", "train", str(tmp_path), 0)


def test_ten_folds_test_every_review_once(tmp_path):
    write_reviews(tmp_path)
    tested = []
    for fold in range(10):
        splits = {
            split: load("movie_reviews", split, str(tmp_path), fold)
            for split in ("train", "val", "test")
        }
        texts = [text for split in splits.values() for text in split.texts]
        assert len(texts) == len(set(texts)) == 50
        assert [len(split.texts) for split in splits.values()] == [40, 5, 5]
        tested += splits["test"].texts
        for split in splits.values():
            for (text,), label in zip(*split, strict=True):
                assert text.startswith(f"{label} café")
        following = load("movie_reviews", "test", str(tmp_path), (fold + 1) % 10)
        assert splits["val"] == following
    assert len(set(tested)) == 50


@needs_reviews
def test_movie_reviews_have_the_published_size():
    """Pang and Lee 2005: 5331 positive and 5331 negative sentences."""
    splits = [
        load("movie_reviews", x, str(REVIEWS), 0) for x in ("train", "val", "test")
    ]
    labels = [label for split in splits for label in split.labels]
    assert [labels.count(label) for label in ("neg", "pos")] == [5331, 5331]


def test_movie_reviews_without_fold_file_or_split_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match="rt-polarity.neg"):
        load("movie_reviews", "train", str(tmp_path), 0)
    write_reviews(tmp_path)
    for fold in (-1, 10):
        with pytest.raises(ValueError, match=f"data.fold .* [09], got {fold}"):
            check_values({"data.fold": fold})
    with pytest.raises(ValueError, match="'dev'; it has test, val, train"):
        load("movie_reviews", "dev", str(tmp_path), 0)


@pytest.mark.parametrize("name", ["labelled", "movie_reviews"])
def test_labelled_texts_without_their_folder_raise_with_the_key(name, tmp_path):
    with pytest.raises(ValueError, match=f"{name} .*data.directory"):
        load(name, "train", None, 0)
