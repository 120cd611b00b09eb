"""The interface between a task and everything else.

The trainer, trials, checkpoints, sweeps, statistics and reports depend only on this
file, not on particular tasks.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from headcount.configs.validation import choose
from headcount.data import tokenizers
from headcount.data.batches import (
    PackedBatches,
    batch_spec,
    packed_evaluation_batches,
    unpacked_batches,
)
from headcount.data.examples import ArraySpec, Examples
from headcount.data.packing import largest_rows
from headcount.models.cross_entropy import cross_entropy
from headcount.models.maps import attention_maps, single_example
from headcount.models.transformer import Transformer
from headcount.runtime.logging import say


@dataclasses.dataclass(frozen=True)
class Metric:
    """A score of a trained model.

    Values are stored unscaled. A metric with unit "%" is stored as a fraction, and
    multiplied by 100 for display.
    """

    name: str  # in rows and files: "exact_match"
    label: str  # in tables and figures: "exact match"
    unit: str = ""  # "nats per token", "%", "points"
    higher_is_better: bool = True
    format: str = ".2f"  # of the scaled value
    bounds: tuple[float | None, float | None] = (None, None)  # of the scaled value
    margin: float | None = None  # of equivalence, scaled; None: no default
    per_token: bool = False  # not comparable between vocabularies

    @property
    def scale(self) -> float:
        """Factor from stored to displayed values."""
        return 100.0 if self.unit == "%" else 1.0

    def show(self, value: float | None) -> str:
        """Format a stored value for a table."""
        if value is None:
            return "–"
        text = format(value * self.scale, self.format)
        return text + "%" if self.unit == "%" else text

    def clip(self, low: float, high: float) -> tuple[float, float]:
        """Clip an interval of scaled values to the metric's bounds."""
        least, most = self.bounds
        return (
            low if least is None else max(low, least),
            high if most is None else min(high, most),
        )


LOSS = Metric(
    *("loss", "loss", "nats per token", False, ".4f", (0.0, None)),
    margin=0.005,
    per_token=True,
)


class Run(NamedTuple):
    """The models of all trials of a run, during training or afterwards."""

    config: Any  # ml_collections.ConfigDict
    graph: nnx.GraphDef
    params: nnx.State  # leaves have a leading trial axis R
    trials: list[dict]  # see `training.trials`
    head_gates: dict  # R L N by site, for sites where a trial sets a gate
    step: list[int]  # of each trial's parameters
    diverged_at: list[int | None]
    task: "Task"
    mesh: jax.sharding.Mesh  # of the parameters

    def of(self, trial: int) -> tuple:
        """Return the parameters and the head gates of a trial.

        Raises:
            ValueError: the run has no such trial.
        """
        count = len(self.trials)
        if not 0 <= trial < count:
            raise ValueError(f"trial must be from 0 to {count - 1}, got {trial}.")
        return jax.tree.map(lambda leaf: leaf[trial], (self.params, self.head_gates))

    def predict(self, lines: Sequence[str], **options) -> list[str]:
        """Translate, complete, tag or classify lines of text; see `Task.predict`.

        Tagging returns several results per line.

        Raises:
            TypeError: `lines` is a single string, or the task has no such option.
        """
        check_lines("lines", lines)
        check_names(options, ("trial", "first", *self.task.options))
        return list(self.task.predict(self, lines, **options))

    def evaluate(self, split: str, **options) -> list[dict]:
        """Score every trial on a split; see `Task.evaluate`.

        Raises:
            TypeError: the task has no such option.
            ValueError: an option is out of range.
        """
        names = self.task.evaluation_options
        check_names(options, ("trials", "quick", *names))
        given = {n: options[n] for n in names if options.get(n) is not None}
        self.task.check_options(given, evaluates=True)
        with jax.set_mesh(self.mesh):
            return self.task.evaluate(self, self.task.load(split), **options)

    def attention(
        self,
        source: str,
        target: str | None = None,
        site: str | None = None,
        trial: int = 0,
    ) -> "Attention":
        """Return the attention weights of all heads of a site for a text.

        Args:
            source: the text.
            target: its translation; None uses the model's own. Only for translation.
            site: "encoder", "decoder" or "cross"; None: cross, if the model has it.
            trial: index of the trial.

        Raises:
            ValueError: there is no such site or trial, or the text is too long.
        """
        params, gates = self.of(trial)
        fields = self.task.fields_of_text(self, source, target, trial)
        with jax.set_mesh(self.mesh):
            maps = attention_maps(self.graph, params, gates, single_example(fields))
        if site is None:
            site = "cross" if "cross" in maps else next(iter(maps))
        choose("site", site, maps)
        weights, norm_weights = (np.asarray(x[:, 0]) for x in maps[site])
        labels = self.task.labels(fields)
        queries, keys = (labels[name] for name in LABELS[site])
        return Attention(weights, norm_weights, queries, keys)


def check_lines(name: str, lines: Sequence[str]) -> None:
    """Raise a TypeError if `lines` is a single string instead of a list."""
    if isinstance(lines, str):
        raise TypeError(f"{name} must be a list of strings, as in [{lines!r}]")


def check_names(options: dict, known: tuple[str, ...]) -> None:
    """Raise a TypeError for an option whose name is not known."""
    for name in options.keys() - {*known}:
        raise TypeError(f"There is no option {name}; there are {', '.join(known)}.")


def warn_of_lines(
    encoded: Iterable, first: int, unk: int | None, longest: float, part: str = ""
) -> None:
    """Log the lines that are longer than in training, or have unknown tokens.

    Args:
        encoded: token ids of each line.
        first: number of the first line, from 0.
        unk: id of the unknown token; None: there is none.
        longest: number of tokens of the longest training example.
        part: what of each line is encoded, as in "'s target"; empty: all of it.
    """
    for number, ids in enumerate(encoded, first + 1):
        problems = []
        if len(ids) > longest:
            most = f"more than the {longest} of any training example"
            problems.append(f"{len(ids)} tokens, {most}")
        unknown = sum(int(token) == unk for token in ids)
        if unknown:
            problems.append(f"characters or words that training never saw: {unknown}")
        for problem in problems:
            say(f"Line {number}{part} has {problem}; expect a poor result.")


class Attention(NamedTuple):
    """Attention weights of the heads of a site for one text."""

    weights: np.ndarray  # L N T S
    norm_weights: np.ndarray  # L N T S, or NaN; see models.maps.norm_weighted_map
    queries: list[str]  # T tokens
    keys: list[str]  # S tokens


# The tokens of queries and keys, by site; the decoder input is the shifted target.
LABELS = {
    "encoder": ("source", "source"),
    "decoder": ("decoder input", "decoder input"),
    "cross": ("decoder input", "source"),
}


class Batches(Protocol):
    """The training batches of R trials, which depend only on the seeds and the step."""

    spec: dict[str, ArraySpec]  # of one trial's batch, with a leading axis B
    steps_per_epoch: float

    def part(self, step: int, trials: slice, rows: slice) -> dict:
        """Return the selected trials and rows of a step's batch, as arrays R B ..."""


class Task:
    """Base class of tasks; see `tasks.language_model` for a complete one.

    Args:
        config: the whole config. Values that don't fit the task raise a ValueError that
            names the key.
        folder: folder of the vocabularies, WORKDIR/tokenizer. None: there is no data,
            and `spec` and `build` assume vocabularies of the maximum size.
    """

    metrics: tuple[Metric, ...]  # the first one selects the best models by default
    corpus_keys: tuple[str, ...] = ("name", "directory")  # of config.data: the corpus
    test_split: str = "test"  # default split for final scores
    has_targets: bool = False  # whether texts come in pairs
    has_predictions: bool = True  # whether `evaluate` returns one for each example
    options: tuple[str, ...] = ()  # decoding flags of `predict`
    evaluation_options: tuple[str, ...] = ()  # decoding flags of `evaluate`
    stacks: tuple[bool, bool] | None = None  # encoder and decoder needed; None: any
    text_fields: tuple[str, ...]  # that `read` returns; for `read_fields`
    fields: tuple[str, ...] = ("source",)  # of a batch
    aligned: dict[str, str] = {}  # other fields: the side that each is aligned with
    splits_words: bool = False  # whether each word of a text is encoded by itself
    min_length: int = 2  # of training examples; 2 leaves out those with only EOS

    def __init__(self, config, folder: Path | None = None):
        self.config, self.folder = config, folder
        model = config.model
        counts = model.num_encoder_layers, model.num_decoder_layers
        if self.stacks not in (None, tuple(count > 0 for count in counts)):
            wanted = ["at least 1" if needed else "0" for needed in self.stacks]
            raise ValueError(
                f"The task {config.task.name} needs model.num_encoder_layers "
                f"{wanted[0]} and model.num_decoder_layers {wanted[1]}, got "
                f"{counts[0]} and {counts[1]}."
            )

    def lacking(self, member: str) -> NotImplementedError:
        """Return the error for a member that a subclass should define."""
        return NotImplementedError(
            f"The class {type(self).__name__} of the task {self.config.task.name} "
            f"does not define `{member}`."
        )

    def read(self, split: str) -> dict[str, list[str]]:
        """Return the raw text of a split by field.

        Raises:
            ValueError, OSError: there is no such split.
        """
        raise self.lacking("read")

    def read_fields(self, split: str) -> dict[str, list[str]]:
        """Return what `read` returns; a task of one's own may return anything.

        Raises:
            ValueError: a field is missing, empty, no list, or shorter than another.
        """
        text, required = self.read(split), self.text_fields
        fields = text if isinstance(text, dict) else {}
        for name, lines in fields.items():
            if isinstance(lines, str) or not isinstance(lines, Sized):
                raise ValueError(
                    f"`read` of the task {self.config.task.name} must return lists, "
                    f"and its {name} of {split!r} is a {type(lines).__name__}."
                )
        counts = [len(lines) for lines in fields.values()]
        if not (set(required) <= set(fields) and len(set(counts)) == 1 and counts[0]):
            received = ", ".join(f"{name} ({len(x)})" for name, x in fields.items())
            raise ValueError(
                f"`read` of the task {self.config.task.name} must return a dict with "
                f"{' and '.join(required)}, lists of the same length and not empty; "
                f"for the split {split!r} it returns {received or type(text).__name__}."
            )
        return text

    def load(self, split: str) -> Examples:
        """Return a tokenised split; "train" builds the vocabulary if there is none."""
        raise self.lacking("load")

    def check_scoring(self, split: str) -> None:
        """Raise a ValueError or OSError unless a split can be read and scored."""
        self.read(split)
        self.check_references(split)

    def check_references(self, split: str) -> None:
        """Raise a ValueError or OSError if references besides the text are missing.

        Some scores use other references than the split's text.
        """

    def check_options(self, options: dict, evaluates: bool = False) -> None:
        """Raise a ValueError for a decoding option that the task does not have.

        Args:
            options: options by name.
            evaluates: whether they are for `evaluate` instead of `predict`.
        """
        for name in options:
            if name not in (self.evaluation_options if evaluates else self.options):
                where = " when it is scored" if name in self.options else ""
                raise ValueError(
                    f"--{name} has no meaning for the task {self.config.task.name}"
                    f"{where}."
                )

    def set_directory(self, directory: str) -> None:
        """Read local data files from another folder than data.directory."""
        with self.config.unlocked():
            self.config.data.directory = directory

    def spec(
        self, rows: int | None = None, length: int | None = None
    ) -> dict[str, ArraySpec]:
        """Return the shapes and dtypes of a batch; default: the largest of the config.

        The default fits the default of `batches`.

        Args:
            rows: number of rows.
            length: tokens per row, the same for all of `fields`.
        """
        if rows is None:
            data = self.config.data
            rows, length = largest_rows(data.batch_tokens, data.max_length)
        widths = dict.fromkeys(self.fields, length)
        return batch_spec((*self.fields, *self.aligned), rows, widths, self.aligned)

    def build(self, *, rngs: nnx.Rngs, **options) -> nnx.Module:
        """Build a new model of the config, with the vocabulary sizes of `folder`.

        By default, a model with the vocabulary of `self.tokenizer`.

        Args:
            rngs: for the initial values.
            options: further arguments of `Transformer`.
        """
        size = tokenizers.max_vocab_size(self.config.data)
        if self.folder is not None:
            size = self.tokenizer.vocab_size
        return Transformer(size, **self.config.model.to_dict(), **options, rngs=rngs)

    def new_parameters(self, folder: Path) -> tuple[str, ...]:
        """Return the parts of the model that train.init_from must not copy.

        Args:
            folder: folder of the other run's vocabularies.
        """
        return ()

    def batches(self, examples: Examples, seeds: list[int]) -> Batches:
        """Return the training batches of trials with these seeds.

        By default, several examples share a row; see `data.batches.PackedBatches`.
        """
        data = self.config.data
        return PackedBatches(
            examples.fields,
            aligned=self.aligned,
            batch_tokens=data.batch_tokens,
            max_length=data.max_length,
            min_length=self.min_length,
            seeds=seeds,
        )

    @property
    def tokens_at_once(self) -> int:
        """Tokens that training computes at once, which bound evaluation's batches."""
        return self.config.data.batch_tokens // self.config.train.accumulate_steps

    def evaluation_batches(
        self, examples: Examples, packed: bool = True
    ) -> Iterable[dict]:
        """Return every example once, in batches without a trial axis.

        If `packed` is False, each row holds one example.

        The default fits the default of `batches`.
        """
        fields, tokens = examples.fields, self.tokens_at_once
        options = {"aligned": self.aligned, "batch_tokens": tokens}
        if packed:
            return packed_evaluation_batches(fields, **options)
        return [batch for _, batch in unpacked_batches(fields, **options)]

    def loss(self, model, batch: dict, **options) -> tuple[jax.Array, jax.Array]:
        """Return the loss summed over a batch, and its weight.

        `training.step.loss_and_gradient` divides the loss by the weight.

        Args:
            model: model of one trial, in its compute dtype.
            batch: batch of one trial, arrays B ... A row whose segments are all 0 fills
                the batch, and must add neither loss nor weight.
            options: `label_smoothing`, and options of `Transformer.hidden`.
        """
        raise self.lacking("loss")

    def evaluate(self, run: Run, examples: Examples, **options) -> list[dict]:
        """Score trials; return a dict from metric name to value for each.

        A dict may also have `predictions` (one string per example), `signatures` of the
        metrics, and the decoding `options` that were used.

        Args:
            options: `trials`, the trials to score (default: all); `quick`, to evaluate
                as during training; and those in the task's `evaluation_options`.
        """
        raise self.lacking("evaluate")

    def predict(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Yield the model's outputs for lines of text.

        Args:
            options: `trial`, the trial to use; `first`, the number of the first line;
                and those in the task's `options`.
        """
        raise self.lacking("predict")

    def score_lines(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Yield the log-probability (nats), a tab, and the token count of each line."""
        raise ValueError(f"The task {self.config.task.name} has no --score.")

    def score_tokens(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Yield the tokens of each line and their log-probabilities, as JSON."""
        raise ValueError(f"The task {self.config.task.name} has no --score_tokens.")

    def token_strings(self, field: str, ids) -> list[str]:
        """Return the text of each token of a field, for labels in figures.

        By default, all fields share `self.tokenizer`.
        """
        return self.tokenizer.pieces(ids)

    def labels(self, fields: dict[str, list[int]]) -> dict[str, list[str]]:
        """Return the text of each token by field, including the decoder's input."""
        labels = {
            name: self.token_strings(name, ids)
            for name, ids in fields.items()
            if name not in self.aligned  # such as tags, which are no tokens
        }
        if "target" in fields:
            inputs = self.decoder_input(fields["target"])
            labels["decoder input"] = self.token_strings("target", inputs)
        return labels

    def decoder_input(self, target: list[int]) -> list[int]:
        """Return the tokens that the decoder reads to predict a target."""
        return [self.config.model.bos, *target[:-1]]

    def fields_of_text(
        self, run: Run, source: str, target: str | None, trial: int
    ) -> dict[str, list[int]]:
        """Return the token ids by field of a user's text; see `Run.attention`.

        Raises:
            ValueError: the text is empty or longer than the model supports, or has a
                target although the task has none.
        """
        if target is not None:
            raise ValueError(f"The task {self.config.task.name} has no target texts.")
        fields = self.encode_text(source)
        self.check_length(fields, "The text")
        return fields

    def encode_text(self, text: str) -> dict[str, list[int]]:
        """Return the token ids by field of a user's text."""
        raise self.lacking("encode_text")

    def check_length(self, fields: dict[str, list[int]], what: str) -> None:
        """Raise a ValueError if a text has no tokens or too many."""
        model = self.config.model
        for ids in fields.values():
            if not ids:
                raise ValueError(f"{what} has no tokens.")
            if model.positions == "learned" and len(ids) > model.max_positions:
                raise ValueError(
                    f"{what} has {len(ids)} tokens, more than model.max_positions="
                    f"{model.max_positions}, the most that the model takes."
                )

    def fields_to_plot(
        self, run: Run, examples: Examples, index: int, trial: int, **options
    ) -> dict[str, list[int]]:
        """Return the token ids by field of an example whose attention is to be plotted.

        For generated fields, these are the model's own output, not the reference.
        """
        return {name: field[index].tolist() for name, field in examples.fields.items()}

    def bootstrap(self, metric: Metric, systems: dict[str, list[str]], text: dict):
        """Bootstrap the test examples for intervals and p-values.

        Args:
            systems: predictions by name; the first is the baseline.
            text: the split's text, as returned by `read`.

        Returns:
            None if the task has no bootstrap for the metric. Otherwise, by system:
            (value, half width of its 95% interval, p-value for no difference from the
            baseline or None for the baseline itself), unscaled.
        """
        return None


def token_loss(
    model: nnx.Module,
    hidden: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    scored: Bool[Array, "B T"],
    label_smoothing: Float[Array, ""] | float,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the summed cross-entropy of the scored tokens, and their number.

    Args:
        model: a `Transformer`.
        hidden: output of `model.hidden`.
        labels: tokens to predict.
        scored: which tokens count.
        label_smoothing: see `models.cross_entropy`.
    """
    features, table = model.output(hidden)
    weights = scored.astype(jnp.float32)
    loss = cross_entropy(
        features.reshape(-1, features.shape[-1]),
        table,
        labels.reshape(-1),
        weights.reshape(-1),
        label_smoothing,
    )
    return loss, weights.sum()
