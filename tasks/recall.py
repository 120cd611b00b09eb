"""Language modelling of the corpus `recall` (see `data.recall`).

A document is a row, instead of a part of a stream, and only the values in its second
half are scored.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from headcount.data import recall
from headcount.data.examples import Examples, Ragged
from headcount.tasks.base import LOSS, Metric, Run, Task
from headcount.tasks.heldout_loss import loss_and_share
from headcount.tasks.language_model import LanguageModel, scored_tokens

RECALL = Metric("recall", "recall", "%", bounds=(0, 100), margin=1.0)


class Recall(LanguageModel):
    """Predicts the value that a key had earlier in the document."""

    metrics = (LOSS, RECALL)
    aligned = {"target_weights": "target"}  # marks the scored words

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        if config.data.tokenizer != "words":  # scored, or not, as a whole
            raise ValueError(
                f"data.tokenizer must be words for data.name=recall, got "
                f"{config.data.tokenizer}."
            )

    def check_options(self, options: dict, evaluates: bool = False) -> None:
        """See `Task.check_options`."""
        if "stride" in options:
            raise ValueError(
                "--stride has no meaning for data.name=recall: it has no windows."
            )
        super().check_options(options, evaluates)

    def make_tokenizer(self, texts: list[str]) -> None:
        """Make the tokenizer of all words, also of those that no text has."""
        super().make_tokenizer(recall.vocabulary(self.config.data.vocab_size))

    def check_tokens(self, split: str, tokens: np.ndarray) -> None:
        """Accept any split: its size and its words are fixed."""

    def spec(self, rows: int | None = None, length: int | None = None) -> dict:
        """See `Task.spec`."""
        return Task.spec(self, rows, length)

    def batches(self, examples: Examples, seeds: list[int]):
        """See `Task.batches`."""
        return Task.batches(self, self.with_weights(examples), seeds)

    def evaluation_batches(
        self, examples: Examples, packed: bool = True
    ) -> Iterable[dict]:
        """See `Task.evaluation_batches`."""
        return Task.evaluation_batches(self, self.with_weights(examples), packed)

    def with_weights(self, examples: Examples) -> Examples:
        """Add the field that marks the scored tokens."""
        target = examples.fields["target"]
        scored = recall.is_scored(self.config.data.max_length).astype(np.int32)
        weights = Ragged(np.tile(scored, len(target)), target.offsets)
        fields = {"target": target, "target_weights": weights}
        return dataclasses.replace(examples, fields=fields)

    def scores(self, model, batch: dict, **options) -> tuple[jax.Array, ...]:
        """Return the summed loss, its weight, and the number of exact predictions."""
        loss, weight = self.loss(model, batch, **options)
        logits = model.logits(model.hidden(batch, **options))
        exact = (logits.argmax(-1) == batch["target"]) & scored_tokens(batch)
        return loss, weight, exact.sum().astype(jnp.float32)

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
    ) -> list[dict]:
        """Score the loss and the share of recalled values; see `Task.evaluate`."""
        trials = range(len(run.trials)) if trials is None else trials
        batches = self.evaluation_batches(examples)
        return loss_and_share(run, self.scores, batches, trials, "recall")
