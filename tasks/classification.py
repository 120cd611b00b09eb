"""Classification: one label per text, or per pair of texts, with an encoder."""

import dataclasses
import json
from collections.abc import Iterator, Sequence

import numpy as np

from headcount.data import labelled
from headcount.data.examples import Examples, Ragged
from headcount.tasks.base import LOSS, Run, warn_of_lines
from headcount.tasks.classes import ACCURACY, MACRO_F1, UNKNOWN_CLASS, ClassTask

# per text: the vocabulary does not change what it measures
TEXT_LOSS = dataclasses.replace(LOSS, unit="nats per text", per_token=False)


class Classification(ClassTask):
    """Predicts one label per text, at the text's first token.

    A text is encoded as BOS, its tokens, and EOS. A pair is encoded as BOS and both
    texts, each followed by EOS.
    """

    corpus_keys = ("name", "directory", "fold")
    text_fields = ("source", "label")
    metrics = (ACCURACY, MACRO_F1, TEXT_LOSS)

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        self.pooling = config.task.pooling

    def read(self, split: str) -> dict[str, list[str]]:
        """Return the texts (pairs are joined by a tab) and labels of a split."""
        data = self.config.data
        corpus = labelled.load(data.name, split, data.directory, data.fold)
        texts = ["\t".join(text) for text in corpus.texts]
        return {"source": texts, "label": corpus.labels}

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text = self.read_fields(split)
        if split == "train":
            lines = [part for line in text["source"] for part in line.split("\t")]
            self.make_vocabulary(lines, text["label"])
        ids = self.class_ids(text["label"], split)
        return self.encode(split, text, [ids[label] for label in text["label"]])

    def encode(self, split: str, text: dict, labels: list[int]) -> Examples:
        """Tokenise texts; the first token, BOS, carries the label."""
        parts = [line.split("\t") for line in text["source"]]
        fields, _ = self.encode_parts(split, parts)
        tags = np.zeros_like(fields["source"].tokens)
        tags[fields["source"].offsets[:-1]] = labels
        fields["tags"] = Ragged(tags, fields["source"].offsets)
        return Examples(split, fields, text)

    def true_labels(self, examples: Examples) -> list[list[str]]:
        """See `ClassTask.true_labels`; a text has one."""
        return [[label] for label in examples.text["label"]]

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0
    ) -> Iterator[str]:
        """Classify lines; yield JSON with the label and all labels' probabilities."""
        if not lines:
            return
        unknown = [UNKNOWN_CLASS] * len(lines)
        examples = self.encode("input", {"source": list(lines)}, unknown)
        longest = self.config.data.max_length
        warn_of_lines(examples.fields["source"], first, self.tokenizer.unk, longest)
        for probs in self.probabilities(run, examples, trial):
            pairs = zip(self.classes, probs[0], strict=True)
            row = {"label": self.classes[int(probs[0].argmax())]}
            row["probabilities"] = {name: round(float(p), 4) for name, p in pairs}
            yield json.dumps(row, ensure_ascii=False)
