"""Common base of the tasks that predict one class per token or per text."""

import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx

from headcount.data import batches, tokenizers
from headcount.data.examples import Examples
from headcount.models import precision
from headcount.models.dropout import random_bits
from headcount.models.trial_axis import over_trials
from headcount.runtime import sharding
from headcount.runtime.schema import violation
from headcount.runtime.workdir import has_started, read_json
from headcount.tasks import class_scores
from headcount.tasks.base import Metric, Run
from headcount.tasks.encoder import (
    EncoderTask,
    is_text,
    make_tokenizer,
)
from headcount.tasks.heldout_loss import heldout_loss, logits_of

ACCURACY = Metric("accuracy", "accuracy", "%", bounds=(0, 100), margin=0.5)
MACRO_F1 = Metric("macro_f1", "macro F1", "%", bounds=(0, 100), margin=1.0)
ENTITY_F1 = Metric("entity_f1", "entity F1", "%", bounds=(0, 100), margin=1.0)
UNKNOWN_CLASS = -1  # marks a token whose class does not occur in the training split
CLASSES = "classes.json"


class ClassTask(EncoderTask):
    """Predicts the classes of some tokens of every example.

    The field `tags` is aligned with the tokens: the index of a token's class plus one,
    0 for tokens without a class, or `UNKNOWN_CLASS`.
    """

    own_fields = ("tags",)
    pooling: str | None = None  # see models.output_heads

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        if not 0 <= config.task.token_dropout < 1:
            raise ValueError(
                f"task.token_dropout must be from 0 to below 1, got "
                f"{config.task.token_dropout}."
            )

    @cached_property
    def classes(self) -> list[str]:
        """The names of the classes, by index, from the run's folder."""
        return read_classes(self.folder / CLASSES)

    def make_vocabulary(self, texts: list[str], labels: list[str]) -> None:
        """Build the tokenizer and the list of classes of a new run.

        Classes copied by train.init_from are kept if they include all labels.
        """
        classes = sorted(set(labels))
        if len(classes) == 1:
            keys = ", ".join(f"data.{key}" for key in self.corpus_keys)
            raise ValueError(
                f"The training examples have only one class, {classes[0]!r}, so there "
                f"is nothing to learn; check {keys}."
            )
        self.tokenizer = make_tokenizer(self.config, self.folder, texts)
        path = self.folder / CLASSES
        is_new = not has_started(self.folder.parent)
        if is_new and not (path.is_file() and set(classes) <= set(read_classes(path))):
            tokenizers.write(path, json.dumps(classes).encode())
        warn_of_labels(labels)

    def new_parameters(self, folder) -> tuple[str, ...]:
        """See `Task.new_parameters`: other classes need a new classifier."""
        theirs = folder / CLASSES
        same = theirs.is_file() and read_classes(theirs) == self.classes
        return () if same else ("classifier",)

    def class_ids(self, labels: list[str], split: str) -> dict[str, int]:
        """Return the index of each class plus one, or `UNKNOWN_CLASS` for new classes.

        Raises:
            ValueError: all classes are new, so the loss would be undefined.
        """
        ids = {label: i for i, label in enumerate(self.classes, 1)}
        unknown = set(labels) - ids.keys()
        if len(unknown) == len(set(labels)):
            raise ValueError(
                f"The split {split!r} has no class of the training examples: its "
                f"classes are {listed(unknown)}, theirs {listed(self.classes)}."
            )
        if unknown:
            count = sum(label in unknown for label in labels)
            logging.warning(
                "%s has %d examples of classes unknown in training: %s. They count as "
                "wrong.",
                split,
                count,
                listed(unknown),
            )
        return ids | dict.fromkeys(unknown, UNKNOWN_CLASS)

    def build(self, *, rngs) -> nnx.Module:
        """See `Task.build`."""
        num_classes = self.config.data.num_classes
        if self.folder is not None:
            num_classes = len(self.classes)
        return super().build(rngs=rngs, num_classes=num_classes, pooling=self.pooling)

    def loss(self, model, batch: dict, label_smoothing=0.0, **options):
        """Return the label-smoothed cross-entropy of the scored tokens' classes."""
        rate, key = self.config.task.token_dropout, options.get("key")
        if rate and key is not None:
            batch = batch | drop_tokens(batch, rate, key, self.special)
        logits = model.class_logits(batch, **options).astype(jnp.float32)
        weights = (batch["tags"] > 0).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        labels = jnp.maximum(batch["tags"] - 1, 0)[..., None]
        loss = -jnp.take_along_axis(log_probs, labels, axis=-1)[..., 0]
        smoothed = -log_probs.mean(-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * smoothed
        return (loss * weights).sum(), weights.sum()

    def true_labels(self, examples: Examples) -> list[list[str]]:
        """Return the labels of each example, one per token that has a class."""
        raise self.lacking("true_labels")

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
    ) -> list[dict]:
        """Score labels, with a report per class unless quick; see `Task.evaluate`."""
        trials = range(len(run.trials)) if trials is None else trials
        loss = heldout_loss(run, self.evaluation_batches(examples))
        predicted = self.predicted_labels(run, examples)
        true = self.true_labels(examples)
        flat, rows = [label for labels in true for label in labels], []
        for trial in trials:
            guesses = [label for labels in predicted[trial] for label in labels]
            row = {"loss": float(loss[trial])} | class_scores.score(flat, guesses)
            if ENTITY_F1 in self.metrics:
                row["entity_f1"] = class_scores.entity_f1(true, predicted[trial])
            if not quick:
                row["report"] = class_scores.report(flat, guesses)
                row["confusions"] = class_scores.confusions(flat, guesses)
                if ENTITY_F1 in self.metrics:
                    row["entities"] = class_scores.entity_report(true, predicted[trial])
                row["predictions"] = [" ".join(labels) for labels in predicted[trial]]
            rows.append(row)
        return rows

    def predicted_labels(self, run: Run, examples: Examples) -> list[list[list[str]]]:
        """Predict labels by trial and example, in the form of `true_labels`."""

        def best(batch):
            rows, batch = len(batch["source"]), sharding.over_data(batch)
            classes = best_classes(run.graph, run.params, run.head_gates, batch)
            return np.moveaxis(sharding.fetch(classes), 0, -1)[:rows]

        of_tokens = self.by_example(examples, best)
        tags = examples.fields["tags"]
        tagged = [best[ids != 0] for best, ids in zip(of_tokens, tags, strict=True)]
        return [
            [[self.classes[i] for i in best[:, r]] for best in tagged]
            for r in range(len(run.trials))
        ]

    def probabilities(self, run: Run, examples: Examples, trial: int) -> list:
        """Return the class probabilities of every token, by example."""
        params, gates = run.of(trial)

        def of(batch):
            logits = logits_of(run.graph, params, gates, batch)
            return np.asarray(jax.nn.softmax(logits))

        with jax.set_mesh(run.mesh):
            return self.by_example(examples, of)

    def by_example(self, examples: Examples, of_batch) -> list[np.ndarray]:
        """Apply a function to packed batches; split its results by example.

        Args:
            examples: examples to pack.
            of_batch: function from a batch to an array B T ...

        Returns:
            An array T ... for each example.
        """
        order, packed = batches.packed_in_order(
            examples.fields,
            aligned=self.aligned,
            batch_tokens=self.tokens_at_once,
        )
        of_tokens = [of_batch(batch)[batch["source_segments"] > 0] for batch in packed]
        ends = np.cumsum(examples.fields["source"].lengths[order])[:-1]
        results = [None] * len(examples)
        parts = np.split(np.concatenate(of_tokens), ends)
        for index, part in zip(order, parts, strict=True):
            results[index] = part
        return results


def read_classes(path: Path) -> list[str]:
    """Read the names of the classes, by index, from a run's classes.json.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no {path}; train first.")
    classes = read_json(path)
    wrong = violation(classes, [str])
    if wrong is None and len(set(classes)) < len(classes):
        wrong = "it has a class twice"
    if wrong:
        raise ValueError(
            f"{path} is not a list of classes as train.py writes it; restore it: "
            f"{wrong}."
        )
    return classes


def listed(classes) -> str:
    """Format names of classes for a message, at most ten of them."""
    names = sorted(classes)
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more


def warn_of_labels(labels: list[str]) -> None:
    """Log labels that differ only in case, and classes with a single example."""
    lower, counts = {}, {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    for label in sorted(counts):
        if label.lower() in lower:
            logging.warning(
                "The classes %r and %r differ only in case.",
                lower[label.lower()],
                label,
            )
        lower[label.lower()] = label
    once = sorted(label for label, count in counts.items() if count == 1)
    if once:
        logging.warning(
            "%d of %d classes have a single training example: %s.",
            len(once),
            len(counts),
            listed(once),
        )


def drop_tokens(batch: dict, rate: float, key, special) -> dict:
    """Replace random tokens of a batch's source by the unknown token.

    Also replace their first feature, the word in lower case, but keep their affixes.
    """
    bits = random_bits(jax.random.fold_in(key, 1 << 20), batch["source"].shape)
    dropped = (bits < jnp.uint32(rate * 2.0**32)) & is_text(batch, special)
    names = [name for name in ("source", "source_features_0") if name in batch]
    return {name: jnp.where(dropped, special.unk, batch[name]) for name in names}


@partial(jax.jit, static_argnames="graph")
def best_classes(graph, params, head_gates: dict, batch: dict):
    """Return the most probable class of every token, of shape R B T."""

    def one(params, head_gates):
        model = precision.model_of(graph, params)
        return model.class_logits(batch, head_gates=head_gates).argmax(-1)

    return over_trials(one)(params, head_gates)
