"""Classification: one label per text, or per pair of texts, with an encoder."""

import json
from collections.abc import Iterator, Sequence

import numpy as np

from headcount.data import labelled
from headcount.data.examples import Examples, Ragged
from headcount.data.tokenizers import BOS, EOS
from headcount.runtime import sharding
from headcount.tasks import class_scores
from headcount.tasks.base import LOSS, Run
from headcount.tasks.heldout_loss import heldout_loss
from headcount.tasks.tagging import (
    ACCURACY,
    MACRO_F1,
    EncoderTask,
    class_probabilities,
)


class Classification(EncoderTask):
    """Texts with a label each; the label is predicted at the text's first token.

    A text is the token BOS, its own tokens, and EOS; a pair has both texts, each with
    an EOS.
    """

    corpus_keys = ("name", "directory", "fold")
    metrics = (ACCURACY, MACRO_F1, LOSS)

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        self.pooling = config.task.pooling

    def read(self, split: str) -> dict[str, list[str]]:
        """Return texts (pairs joined by a tab) and labels."""
        data = self.config.data
        found = labelled.load(data.name, split, data.directory, data.fold)
        texts = ["\t".join(text) for text in found.texts]
        return {"source": texts, "label": found.labels}

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text = self.read(split)
        if split == "train":
            lines = [part for line in text["source"] for part in line.split("\t")]
            self.make_vocabulary(lines, set(text["label"]))
        ids = self.class_ids(text["label"], split)
        return self.encode(split, text, [ids[label] for label in text["label"]])

    def encode(self, split: str, text: dict, labels: list[int]) -> Examples:
        """Tokenise texts; the first token carries the label."""
        parts = [line.split("\t") for line in text["source"]]
        flat = [part for line in parts for part in line]
        encoded = iter(self.tokenizer.encode(flat, eos=False))
        tokens = []
        for line in parts:
            ids = [BOS]
            for _ in line:
                ids += [*next(encoded).tolist(), EOS]
            tokens.append(ids)
        tags = [
            [label] + [0] * (len(ids) - 1)
            for label, ids in zip(labels, tokens, strict=True)
        ]
        fields = {"source": Ragged.of(tokens), "tags": Ragged.of(tags)}
        return Examples(split, fields, text)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """See `Task.encode_texts`."""
        found = self.encode("input", {"source": texts}, [0] * len(texts))
        return [ids.tolist() for ids in found.fields["source"]]

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
        **options,
    ) -> list[dict]:
        """Score labels; see `Task.evaluate`. A report per class unless quick."""
        trials = range(len(run.trials)) if trials is None else trials
        loss = heldout_loss(run, self.evaluation_batches(examples))
        found, true = self.predicted(run, examples), examples.text["label"]
        rows = []
        for trial in trials:
            guesses = [self.classes[each[0]] for each in found[trial]]
            row = {"loss": float(loss[trial])} | class_scores.score(true, guesses)
            if not quick:
                row["report"] = class_scores.report(true, guesses)
                row["confusions"] = class_scores.confusions(true, guesses)
                row["predictions"] = guesses
            rows.append(row)
        return rows

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0, **options
    ) -> Iterator[str]:
        """Classify lines: JSON with the label and the probability of every label."""
        examples = self.encode("input", {"source": list(lines)}, [0] * len(lines))
        params, gates = run.of(trial)
        found = [None] * len(lines)
        with sharding.using(run.mesh):
            for indices, batch in self.evaluation_batches(examples, packed=False):
                probs = class_probabilities(run.graph, params, gates, batch)
                for row, index in enumerate(indices):
                    found[index] = np.asarray(probs[row, 0])
        for probs in found:
            each = {
                c: round(float(p), 4) for c, p in zip(self.classes, probs, strict=True)
            }
            label = self.classes[int(probs.argmax())]
            yield json.dumps(
                {"label": label, "probabilities": each}, ensure_ascii=False
            )

    def token_strings(self, field: str, ids) -> list[str]:
        """See `Task.token_strings`."""
        return self.tokenizer.pieces(ids)
