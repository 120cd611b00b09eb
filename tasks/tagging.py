"""Tagging with an encoder: one tag per word, predicted at the word's first token."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from headcount.data import columns
from headcount.data.examples import Examples, Ragged
from headcount.tasks.base import LOSS, Run
from headcount.tasks.classes import (
    ACCURACY,
    ENTITY_F1,
    MACRO_F1,
    UNKNOWN_CLASS,
    ClassTask,
    listed,
)

BIO = re.compile(r"O|[BIES]-.+")  # seqeval also interprets E and S, of IOBES


class Tagging(ClassTask):
    """Predicts one tag per word of sentences from CoNLL or CoNLL-U files."""

    corpus_keys = ("name", "directory", "tag")
    text_fields = ("source", "tags")
    eos_after_each, splits_words = False, True

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        self.metrics = (ACCURACY, MACRO_F1, LOSS)
        if config.task.entities:
            self.metrics = (ENTITY_F1, ACCURACY, MACRO_F1, LOSS)

    def read(self, split: str) -> dict[str, list[str]]:
        """Return the words and the tags of each sentence, separated by blanks."""
        data = self.config.data
        sentences = columns.load(data.name, split, data.directory, data.tag)
        if self.config.task.entities:
            check_entities({tag for s in sentences for tag in s.tags}, split)
        clean = [["".join(word.split()) for word in s.words] for s in sentences]
        return {
            "source": [" ".join(words) for words in clean],
            "tags": [" ".join(s.tags) for s in sentences],
        }

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text = self.read_fields(split)
        tags = [line.split(" ") for line in text["tags"]]
        for number, (line, line_tags) in enumerate(
            zip(text["source"], tags, strict=True), 1
        ):
            if len(words := line.split(" ")) != len(line_tags):
                raise ValueError(
                    f"`read` of the task {self.config.task.name} must return a tag per "
                    f"word; sentence {number} of the split {split!r} has {len(words)} "
                    f"words and {len(line_tags)} tags."
                )
        flat = [tag for line in tags for tag in line]
        if split == "train":
            self.make_vocabulary(text["source"], flat)
        ids = self.class_ids(flat, split)
        return self.encode(split, text, [[ids[tag] for tag in line] for line in tags])

    def parts_of_text(self, text: str) -> list[str]:
        """See `EncoderTask.parts_of_text`; the parts are words."""
        return text.split()

    def encode(self, split: str, text: dict, tags: list[list[int]]) -> Examples:
        """Tokenise each word separately; its first token carries the tag."""
        sentences = [line.split(" ") for line in text["source"]]
        fields, firsts = self.encode_parts(split, sentences)
        labels = np.zeros_like(fields["source"].tokens)
        offsets = fields["source"].offsets
        for start, places, of_words in zip(offsets, firsts, tags, strict=False):
            labels[start + np.array(places)] = of_words
        fields["tags"] = Ragged(labels, offsets)
        return Examples(split, fields, text)

    def true_labels(self, examples: Examples) -> list[list[str]]:
        """See `ClassTask.true_labels`; a word has one."""
        return [line.split(" ") for line in examples.text["tags"]]

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """Tag lines of words separated by blanks.

        For each line, yield one line per word (the word, its tag, and the tag's
        probability), then an empty line.
        """
        words = [line.split() for line in lines]
        full = {"source": [" ".join(sentence) for sentence in words if sentence]}
        if full["source"]:
            unknown = [
                [UNKNOWN_CLASS] * len(sentence) for sentence in words if sentence
            ]
            examples = self.encode("input", full, unknown)
            probabilities = iter(self.probabilities(run, examples, trial))
            tags = iter(examples.fields["tags"])
        for sentence in words:
            if sentence:
                probs = next(probabilities)[next(tags) != 0]
                for word, of_word in zip(sentence, probs, strict=True):
                    best = int(of_word.argmax())
                    yield f"{word}\t{self.classes[best]}\t{of_word[best]:.4f}"
            yield ""


def check_entities(tags: set[str], split: str) -> None:
    """Raise a ValueError unless all tags are entity tags: B-NAME, I-NAME, O."""
    invalid = [tag for tag in tags if not BIO.fullmatch(tag)]
    if invalid:
        raise ValueError(
            f"task.entities needs tags like B-NAME, I-NAME and O, and the split "
            f"{split!r} has {listed(invalid)}; fix them, or set task.entities=False."
        )
