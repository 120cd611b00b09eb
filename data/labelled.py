"""Labelled texts: TSV files, and Movie Reviews polarity."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import logging

from headcount.data.files import find_file, folder_of, read_lines

NAMES = "labelled", "movie_reviews"  # values of data.name
FOLDS = 10
SEED = 2005
REVIEWS = {"neg": "rt-polarity.neg", "pos": "rt-polarity.pos"}


class Labelled(NamedTuple):
    """Texts, or pairs of texts, and their labels."""

    texts: list[tuple[str, ...]]  # one or two texts per label
    labels: list[str]


def load(name: str, split: str, directory: str | None, fold: int) -> Labelled:
    """Return the texts of a split.

    Args:
        name: "labelled" (TSV files: label, tab, text; or label and two texts) or
            "movie_reviews" (Pang and Lee 2005).
        split: "train", "val" or "test".
        directory: folder of the files.
        fold: for `movie_reviews`, 0 to 9: the tenth that is the test split. The next
            tenth is the dev split.

    Raises:
        ValueError, OSError: there is no such file, or a line is malformed.
    """
    if name not in NAMES:
        raise ValueError(
            f"data.name must be one of {', '.join(NAMES)} for classification, got "
            f"{name!r}."
        )
    folder = folder_of(name, directory)
    if name == "movie_reviews":
        corpus = _movie_reviews(folder, split, fold)
    else:
        corpus = _tsv(find_file(folder, split))
    if not corpus.labels:
        raise ValueError(f"The split {split!r} of {name} has no texts.")
    logging.info("%s %s: %d texts", name, split, len(corpus.labels))
    return corpus


def _tsv(path: Path) -> Labelled:
    texts, labels = [], []
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t")
        if not 2 <= len(fields) <= 3 or not fields[0].strip():
            has = f"{len(fields)} columns" if fields[0].strip() else "no label"
            raise ValueError(
                f"{path}, line {number}, has {has}; it needs a label, a tab and a text "
                f"(or two texts)."
            )
        labels.append(fields[0].strip())
        texts.append(tuple(fields[1:]))
    if len({len(text) for text in texts}) > 1:
        raise ValueError(f"{path} has lines with one text and lines with two.")
    return Labelled(texts, labels)


def _movie_reviews(folder: Path, split: str, fold: int) -> Labelled:
    texts, labels = [], []
    for label, name in REVIEWS.items():
        if not (folder / name).is_file():
            raise FileNotFoundError(f"The folder {folder} holds no {name}.")
        lines = (folder / name).read_bytes().decode("latin-1").split("\n")
        lines = [line.strip() for line in lines if line.strip()]
        texts += [(line,) for line in lines]
        labels += [label] * len(lines)
    order = np.random.default_rng(SEED).permutation(len(texts))
    part = np.arange(len(order)) * FOLDS // len(order)
    of_split = {"test": part == fold, "val": part == (fold + 1) % FOLDS}
    of_split["train"] = ~(of_split["test"] | of_split["val"])
    if split not in of_split:
        raise ValueError(
            f"movie_reviews has no split {split!r}; it has {', '.join(of_split)}."
        )
    chosen = order[of_split[split]]
    return Labelled([texts[i] for i in chosen], [labels[i] for i in chosen])
