"""Tagging: one tag per word, with an encoder. The first token of a word carries it."""

import json
from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from headcount.data import batches, columns, tokenizers
from headcount.data.examples import Examples, Ragged
from headcount.data.packing import largest_rows
from headcount.models import precision
from headcount.models.transformer import Transformer
from headcount.models.trial_axis import over_trials
from headcount.runtime import sharding
from headcount.tasks import class_scores
from headcount.tasks.base import LOSS, Metric, Run, Task
from headcount.tasks.heldout_loss import heldout_loss

ACCURACY = Metric("accuracy", "accuracy", "%", bounds=(0, 100), margin=0.5)
MACRO_F1 = Metric("macro_f1", "macro F1", "%", bounds=(0, 100), margin=1.0)
ENTITY_F1 = Metric("entity_f1", "entity F1", "%", bounds=(0, 100), margin=1.0)
ALIGNED = {"tags": "source"}


class EncoderTask(Task):
    """What tasks with an encoder and a class per token or per text have in common.

    `tags` is a field aligned with the tokens: the class of a scored token plus one; 0
    for tokens that are not scored.
    """

    pooling: str | None = None  # see models.output_heads
    min_length = 1

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        counts = config.model.num_encoder_layers, config.model.num_decoder_layers
        if counts[0] < 1 or counts[1] != 0:
            raise ValueError(
                f"The task {config.task.name} needs an encoder alone: "
                f"model.num_encoder_layers must be at least 1 and "
                f"model.num_decoder_layers 0, got {counts[0]} and {counts[1]}."
            )
        if config.data.tokenizer not in tokenizers.KINDS:
            raise ValueError(
                f"data.tokenizer must be one of {', '.join(tokenizers.KINDS)}, got "
                f"{config.data.tokenizer!r}."
            )

    @cached_property
    def tokenizer(self):
        """The tokenizer in the run's folder."""
        return tokenizers.load_or_make(self.folder, self.config.data.tokenizer, None, 0)

    @cached_property
    def classes(self) -> list[str]:
        """The classes by number, from the run's folder."""
        path = self.folder / "classes.json"
        if not path.is_file():
            raise FileNotFoundError(f"There is no {path}; train first.")
        return json.loads(path.read_text())

    def make_vocabulary(self, texts: list[str], labels: set[str]) -> None:
        """Make the tokenizer and the list of classes of a new run."""
        data = self.config.data
        self.tokenizer = tokenizers.load_or_make(
            self.folder, data.tokenizer, texts, data.vocab_size
        )
        path = self.folder / "classes.json"
        if not path.is_file():
            tokenizers.write(path, json.dumps(sorted(labels)).encode())
        lower = {}
        for label in sorted(labels):
            if label.lower() in lower:
                logging.warning(
                    "The classes %r and %r differ only in case.",
                    lower[label.lower()],
                    label,
                )
            lower[label.lower()] = label

    def class_ids(self, labels: list[str], split: str) -> dict[str, int]:
        """Return the number of each class plus one; 0 if training has never seen it."""
        ids = {label: i for i, label in enumerate(self.classes, 1)}
        unknown = sorted(set(labels) - ids.keys())
        if unknown:
            count = sum(label in set(unknown) for label in labels)
            logging.warning(
                "%s has %d examples of classes unknown in training: %s. They count as "
                "wrong.",
                split,
                count,
                ", ".join(unknown),
            )
        return ids | dict.fromkeys(unknown, 0)

    def spec(self, rows: int | None = None, length: int | None = None) -> dict:
        """See `Task.spec`."""
        if rows is None:
            data = self.config.data
            rows, length = largest_rows(data.batch_tokens, data.max_length)
        return batches.batch_spec(("source", "tags"), rows, {"source": length}, ALIGNED)

    def build(self, *, rngs) -> Transformer:
        """See `Task.build`."""
        size, num_classes = self.config.data.vocab_size, self.config.data.num_classes
        if self.folder is not None:
            size, num_classes = self.tokenizer.vocab_size, len(self.classes)
        return Transformer(
            size,
            num_classes=num_classes,
            pooling=self.pooling,
            **self.config.model.to_dict(),
            rngs=rngs,
        )

    def batches(self, examples: Examples, seeds: list[int]):
        """See `Task.batches`."""
        data = self.config.data
        return batches.PackedBatches(
            examples.fields,
            aligned=ALIGNED,
            batch_tokens=data.batch_tokens,
            max_length=data.max_length,
            min_length=self.min_length,
            seeds=seeds,
        )

    def evaluation_batches(self, examples: Examples, packed: bool = True) -> list:
        """See `Task.evaluation_batches`."""
        of = batches.packed_evaluation_batches if packed else batches.unpacked_batches
        tokens = self.config.data.batch_tokens
        return of(examples.fields, aligned=ALIGNED, batch_tokens=tokens)

    def loss(self, model, batch: dict, label_smoothing=0.0, **options):
        """Return the label-smoothed cross-entropy of the scored tokens' classes."""
        logits = model.class_logits(batch, **options).astype(jnp.float32)
        weights = (batch["tags"] > 0).astype(jnp.float32)
        log_probs = jax.nn.log_softmax(logits)
        labels = jnp.maximum(batch["tags"] - 1, 0)[..., None]
        loss = -jnp.take_along_axis(log_probs, labels, axis=-1)[..., 0]
        smoothed = -log_probs.mean(-1)
        loss = (1 - label_smoothing) * loss + label_smoothing * smoothed
        return (loss * weights).sum(), weights.sum()

    def predicted(self, run: Run, examples: Examples) -> list[list[np.ndarray]]:
        """Return the class of every token: arrays by trial and example."""
        R = len(run.trials)
        found = [[None] * len(examples) for _ in range(R)]
        lengths = examples.fields["source"].lengths
        for indices, batch in self.evaluation_batches(examples, packed=False):
            best = sharding.fetch(
                best_classes(run.graph, run.params, run.head_gates, batch)
            )
            for trial in range(R):
                for row, index in enumerate(indices):
                    found[trial][index] = best[trial, row, : lengths[index]]
        return found


class Tagging(EncoderTask):
    """Sentences of words with a tag each, from CoNLL or CoNLL-U files."""

    corpus_keys = ("name", "directory", "tag")

    def __init__(self, config, folder=None):
        super().__init__(config, folder)
        self.metrics = (ACCURACY, MACRO_F1, LOSS)
        if config.task.entities:
            self.metrics = (ENTITY_F1, ACCURACY, MACRO_F1, LOSS)

    def read(self, split: str) -> dict[str, list[str]]:
        """Return words and tags of each sentence, separated by blanks."""
        data = self.config.data
        sentences = columns.load(data.name, split, data.directory, data.tag)
        clean = [["".join(word.split()) for word in s.words] for s in sentences]
        return {
            "source": [" ".join(words) for words in clean],
            "tags": [" ".join(s.tags) for s in sentences],
        }

    def load(self, split: str) -> Examples:
        """See `Task.load`."""
        text = self.read(split)
        tags = [line.split(" ") for line in text["tags"]]
        flat = [tag for line in tags for tag in line]
        if split == "train":
            self.make_vocabulary(text["source"], set(flat))
        ids = self.class_ids(flat, split)
        return self.encode(split, text, [[ids[tag] for tag in line] for line in tags])

    def encode(self, split: str, text: dict, tags: list[list[int]]) -> Examples:
        """Tokenise each word by itself; its first token carries its tag."""
        sentences = [line.split(" ") for line in text["source"]]
        words = [word for sentence in sentences for word in sentence]
        encoded = iter(self.tokenizer.encode(words, eos=False))
        tokens, labels = [], []
        for sentence, of_words in zip(sentences, tags, strict=True):
            ids, places = [], []
            for _, tag in zip(sentence, of_words, strict=True):
                word = next(encoded).tolist() or [tokenizers.UNK]
                ids += word
                places += [tag] + [0] * (len(word) - 1)
            tokens.append(ids)
            labels.append(places)
        fields = {"source": Ragged.of(tokens), "tags": Ragged.of(labels)}
        return Examples(split, fields, text)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """See `Task.encode_texts`."""
        blank = [[0] * len(text.split()) for text in texts]
        text = {"source": [" ".join(text.split()) for text in texts]}
        found = self.encode("input", text, blank).fields["source"]
        return [ids.tolist() for ids in found]

    def evaluate(
        self,
        run: Run,
        examples: Examples,
        trials: Sequence[int] | None = None,
        quick: bool = False,
        **options,
    ) -> list[dict]:
        """Score tags per word; see `Task.evaluate`. A report per class unless quick."""
        trials = range(len(run.trials)) if trials is None else trials
        loss = heldout_loss(run, self.evaluation_batches(examples))
        found = self.predicted(run, examples)
        true = [line.split(" ") for line in examples.text["tags"]]
        flat, rows = [tag for line in true for tag in line], []
        for trial in trials:
            lines = self.tag_lines(examples, found[trial])
            guesses = [tag for line in lines for tag in line]
            row = {"loss": float(loss[trial])} | class_scores.score(flat, guesses)
            if self.config.task.entities:
                row["entity_f1"] = class_scores.entity_f1(true, lines)
            if not quick:
                row["report"] = class_scores.report(flat, guesses)
                row["confusions"] = class_scores.confusions(flat, guesses)
                row["predictions"] = [" ".join(line) for line in lines]
            rows.append(row)
        return rows

    def tag_lines(self, examples: Examples, found: list[np.ndarray]) -> list[list[str]]:
        """Return the tag of every word: of its first token."""
        lines = []
        starts = self.first_tokens(examples)
        for at, classes in zip(starts, found, strict=True):
            lines.append([self.classes[i] for i in classes[at]])
        return lines

    def first_tokens(self, examples: Examples) -> list[np.ndarray]:
        """Return the places of the words' first tokens in each sentence."""
        sentences = [line.split(" ") for line in examples.text["source"]]
        words = [word for sentence in sentences for word in sentence]
        sizes = np.maximum(self.tokenizer.encode(words, eos=False).lengths, 1)
        starts, place = [], 0
        for sentence in sentences:
            own = sizes[place : place + len(sentence)]
            starts.append(np.cumsum(own) - own)
            place += len(sentence)
        return starts

    def predict(
        self, run: Run, lines: Sequence[str], trial: int = 0, first: int = 0, **options
    ) -> Iterator[str]:
        """Tag lines of words separated by blanks: a line per word, then a blank line.

        Each line has the word, its tag, and the tag's probability.
        """
        text = {"source": [" ".join(line.split()) for line in lines]}
        full = {"source": [line for line in text["source"] if line]}
        if full["source"]:
            blank = [[0] * len(line.split(" ")) for line in full["source"]]
            examples = self.encode("input", full, blank)
            found = self.probabilities(run, examples, trial)
            starts = self.first_tokens(examples)
        place = 0
        for line in text["source"]:
            if line:
                probs = found[place][starts[place]]
                for word, each in zip(line.split(" "), probs, strict=True):
                    best = int(each.argmax())
                    yield f"{word}\t{self.classes[best]}\t{each[best]:.4f}"
                place += 1
            yield ""

    def probabilities(self, run: Run, examples: Examples, trial: int) -> list:
        """Return the probabilities of the classes of every token, by example."""
        params, gates = run.of(trial)
        found = [None] * len(examples)
        lengths = examples.fields["source"].lengths
        with sharding.using(run.mesh):
            for indices, batch in self.evaluation_batches(examples, packed=False):
                probs = np.asarray(class_probabilities(run.graph, params, gates, batch))
                for row, index in enumerate(indices):
                    found[index] = probs[row, : lengths[index]]
        return found

    def token_strings(self, field: str, ids) -> list[str]:
        """See `Task.token_strings`."""
        return self.tokenizer.pieces(ids)


@partial(jax.jit, static_argnames="graph")
def best_classes(graph, params, head_gates: dict, batch: dict):
    """Return the most probable class of every token, R B T."""

    def one(params, head_gates):
        model = precision.merge(graph, params)
        return model.class_logits(batch, head_gates=head_gates).argmax(-1)

    return over_trials(one)(params, head_gates)


@partial(jax.jit, static_argnames="graph")
def class_probabilities(graph, params, head_gates: dict, batch: dict):
    """Return the probabilities of the classes of every token, B T C, by one trial."""
    model = precision.merge(graph, params)
    logits = model.class_logits(batch, head_gates=head_gates)
    return jax.nn.softmax(logits.astype(jnp.float32))
