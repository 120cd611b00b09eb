"""Tagged words: CoNLL columns and CoNLL-U files.

A file has one word per line, and blank lines between sentences. In CoNLL files the tag
is the last column. In CoNLL-U files (universaldependencies.org) it is chosen by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from absl import logging

from headcount.data.files import find_file, folder_of, read_lines

NAMES = "conll", "conllu"  # values of data.name
CONLLU = {"upos": 3, "xpos": 4, "relation": 7}  # column by tag
FEATURES, HEAD = 5, 6
NO_FEATURE = "_"


class Sentence(NamedTuple):
    """A sentence: its words, and a tag for each word."""

    words: list[str]
    tags: list[str]


def load(name: str, split: str, directory: str | None, tag: str) -> list[Sentence]:
    """Return the sentences of a split.

    Args:
        name: "conll" or "conllu".
        split: "train", "val" or "test".
        directory: folder with one file per split; see `find_file`.
        tag: for CoNLL-U files, "upos", "xpos", "relation" or "feature:NAME".

    Raises:
        ValueError, OSError: there is no such file or tag, or a line is malformed.
    """
    if name not in NAMES:
        raise ValueError(
            f"data.name must be one of {', '.join(NAMES)} for tagging, got {name!r}."
        )
    path = find_file(folder_of(name, directory), split)
    read = read_conllu if path.suffix == ".conllu" or name == "conllu" else read_conll
    sentences = read(path, tag)
    if not sentences:
        raise ValueError(f"{path} has no sentences.")
    logging.info("%s %s: %d sentences", name, split, len(sentences))
    return sentences


def read_conll(path: Path, tag: str) -> list[Sentence]:
    """Read columns: the first is the word, the last its tag. `tag` is not used.

    Columns are separated by blanks or tabs; before a tab, a word may have blanks.
    """
    sentences, words, tags = [], [], []
    for number, line in enumerate([*read_lines(path), ""], 1):
        fields = line.split()
        if not fields or fields[0] == "-DOCSTART-":
            if words:
                sentences.append(Sentence(words, tags))
            words, tags = [], []
            continue
        if len(fields) < 2:
            raise ValueError(
                f"{path}, line {number}, has one column; it needs a word and its tag."
            )
        word, tab, _ = line.strip().partition("\t")
        words.append(word if tab else fields[0])
        tags.append(fields[-1])
    return sentences


class Dependency(NamedTuple):
    """A relation of Universal Dependencies between two words, by their indices."""

    relation: str  # without its subtype: "nsubj" for "nsubj:pass"
    dependent: int
    head: int


def dependencies(directory: str | None, split: str) -> list[list[Dependency]]:
    """Return the dependencies of each sentence of a CoNLL-U split, without the root.

    Raises:
        ValueError, OSError: there is no such file, or a line is malformed.
    """
    path = find_file(folder_of("conllu", directory), split)
    by_sentence = []
    for sentence in conllu_rows(path):
        links = []
        for dependent, (number, fields) in enumerate(sentence):
            head = fields[HEAD]
            if not head.isdecimal() or int(head) > len(sentence):
                raise ValueError(
                    f"{path}, line {number}, has the head {head!r}; it must be from 0 "
                    f"to {len(sentence)}, the number of words."
                )
            if int(head):
                relation = fields[CONLLU["relation"]].partition(":")[0]
                links.append(Dependency(relation, dependent, int(head) - 1))
        by_sentence.append(links)
    return by_sentence


def conllu_rows(path: Path) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield each sentence's words, as line numbers with the ten fields.

    Multiword tokens and empty nodes are skipped.
    """
    rows = []
    for number, line in enumerate([*read_lines(path), ""], 1):
        if line.startswith("#"):
            continue
        if not line.strip():
            if rows:
                yield rows
            rows = []
            continue
        fields = line.split("\t")
        if len(fields) != 10:
            raise ValueError(
                f"{path}, line {number}, has {len(fields)} columns; CoNLL-U has 10."
            )
        if not fields[1].strip():
            raise ValueError(f"{path}, line {number}, has no word in its column 2.")
        if fields[0].isdecimal():
            rows.append((number, fields))


def read_conllu(path: Path, tag: str) -> list[Sentence]:
    """Read CoNLL-U; multiword tokens and empty nodes are skipped."""
    if tag not in CONLLU and not tag.startswith("feature:"):
        raise ValueError(
            f"data.tag must be one of {', '.join(CONLLU)} or feature:NAME, got {tag!r}."
        )
    sentences = []
    for rows in conllu_rows(path):
        words = [fields[1] for _, fields in rows]
        if tag in CONLLU:
            tags = [fields[CONLLU[tag]] for _, fields in rows]
        else:
            name = tag.removeprefix("feature:")
            tags = [features(fields).get(name, NO_FEATURE) for _, fields in rows]
        sentences.append(Sentence(words, tags))
    return sentences


def features(fields: list[str]) -> dict[str, str]:
    """Return a word's features by name."""
    return dict(f.split("=", 1) for f in fields[FEATURES].split("|") if "=" in f)
