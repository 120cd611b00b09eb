"""What a model learns: the contract between a task and everything else.

The trainer, trials, checkpoints, sweeps, statistics and reports are written against
this file and know no task by name.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx

from headcount.data.examples import ArraySpec, Examples
from headcount.models.maps import attention_maps, single_example
from headcount.runtime import sharding


@dataclasses.dataclass(frozen=True)
class Metric:
    """A number that a trained model is scored by.

    Values are stored as they are computed; a metric of unit "%" is stored as a fraction
    and shown times 100.
    """

    name: str  # in rows and files: "exact_match"
    label: str  # in tables and figures: "exact match"
    unit: str = ""  # "nats per token", "%", "points"
    higher_is_better: bool = True
    format: str = ".2f"  # of a value as it is shown
    bounds: tuple[float | None, float | None] = (
        None,
        None,
    )  # of a value as it is shown
    margin: float | None = None  # of equivalence, as it is shown; None: no default

    @property
    def scale(self) -> float:
        """What a stored value is multiplied by to be shown."""
        return 100.0 if self.unit == "%" else 1.0

    def show(self, value: float | None) -> str:
        """A stored value as a table has it."""
        if value is None:
            return "–"
        text = format(value * self.scale, self.format)
        return text + "%" if self.unit == "%" else text

    def clip(self, low: float, high: float) -> tuple[float, float]:
        """Cut an interval of shown values to what the metric can be."""
        least, most = self.bounds
        return (
            low if least is None else max(low, least),
            high if most is None else min(high, most),
        )


LOSS = Metric(
    "loss", "loss", "nats per token", False, ".4f", bounds=(0.0, None), margin=0.005
)


class Run(NamedTuple):
    """The models of all trials of a run, during training or afterwards."""

    config: Any  # ml_collections.ConfigDict
    graph: nnx.GraphDef
    params: nnx.State  # leaves with the trial axis R
    trials: list[dict]  # what each trial differs in, with its seed
    head_gates: dict  # R L N by site, where a trial has other gates than 1
    step: list[int]  # of every trial's parameters
    diverged_at: list[int | None]
    task: "Task"
    mesh: jax.sharding.Mesh | None = None  # of the parameters; None: what is set

    def of(self, trial: int) -> tuple:
        """The parameters and the head gates of a trial.

        Raises:
            ValueError: the run has no such trial.
        """
        count = len(self.trials)
        if not 0 <= trial < count:
            raise ValueError(f"trial must be from 0 to {count - 1}, got {trial}.")
        return jax.tree.map(lambda leaf: leaf[trial], (self.params, self.head_gates))

    def predict(self, lines: Sequence[str], **options) -> list[str]:
        """Answer lines of text: translate, complete, tag, classify; see `Task.predict`.

        Tagging gives several results per line.
        """
        return list(self.task.predict(self, lines, **options))

    def evaluate(self, split: str, **options) -> list[dict]:
        """Score every trial on a split; see `Task.evaluate`."""
        return self.task.evaluate(self, self.task.load(split), **options)

    def attention(
        self,
        source: str,
        target: str | None = None,
        site: str | None = None,
        trial: int = 0,
    ) -> "Attention":
        """Return where the heads look in a text of your own.

        Args:
            source: the text.
            target: its translation; None: the model's own. Other tasks have none.
            site: "encoder", "decoder" or "cross"; None: cross, if the model has it.
            trial: whose heads.

        Raises:
            ValueError: there is no such site or trial, or the text is too long.
        """
        params, gates = self.of(trial)
        fields = self.task.fields_of_text(self, source, target, trial)
        with sharding.using(self.mesh):
            found = attention_maps(self.graph, params, gates, single_example(fields))
        if site is None:
            site = "cross" if "cross" in found else next(iter(found))
        if site not in found:
            raise ValueError(f"site must be one of {', '.join(found)}, got {site!r}.")
        weights, norm_weights = (np.asarray(x[:, 0]) for x in found[site])
        labels = self.task.labels(fields)
        queries, keys = (labels[name] for name in LABELS[site])
        return Attention(weights, norm_weights, queries, keys)


class Attention(NamedTuple):
    """Where the heads of a site look in one text."""

    weights: np.ndarray  # L N T S
    norm_weights: np.ndarray  # L N T S; see models.attention.norm_weighted_map
    queries: list[str]  # T tokens
    keys: list[str]  # S tokens


# What queries and keys are, by site; a decoder reads the target one token later.
LABELS = {
    "encoder": ("source", "source"),
    "decoder": ("decoder input", "decoder input"),
    "cross": ("decoder input", "source"),
}


class Batches(Protocol):
    """The training batches of R trials, a function of the seeds and the step alone."""

    spec: dict[str, ArraySpec]  # of one trial's batch, B in front
    steps_per_epoch: float

    def part(self, step: int, trials: slice, rows: slice) -> dict:
        """Return some trials' rows of the batch of a step; each array R B ..."""


class Task:
    """A task; see `tasks.language_model` for one that is complete.

    Args:
        config: the whole config. What does not fit the task raises a ValueError that
            names the key.
        folder: where vocabularies are kept: WORKDIR/tokenizer. None: there is no data;
            `spec` and `build` then take vocabularies to have their full size.
    """

    metrics: tuple[Metric, ...]  # the first is what models are selected by, by default
    corpus_keys: tuple[str, ...] = ("name", "directory")  # of config.data: whose text
    test_split: str = "test"  # that final scores are of, by default
    has_targets: bool = False  # texts come in pairs
    options: tuple[str, ...] = ()  # of `evaluate` and `predict`: decoding flags

    def __init__(self, config, folder: Path | None = None):
        self.config, self.folder = config, folder

    def read(self, split: str) -> dict[str, list[str]]:
        """Return the raw text of a split by field; ValueError or OSError if none."""
        raise NotImplementedError

    def load(self, split: str) -> Examples:
        """Return a tokenised split; "train" makes the vocabulary if there is none."""
        raise NotImplementedError

    def check_scoring(self, split: str) -> None:
        """Raise a ValueError or OSError unless a split can be read and scored."""
        self.read(split)
        self.check_references(split)

    def check_references(self, split: str) -> None:
        """Raise a ValueError or OSError if more than the text is needed and not there.

        Some scores are by other references than the split's text.
        """

    def check_options(self, options: dict) -> None:
        """Raise a ValueError for a decoding option that the task does not have."""
        for name in options:
            if name not in self.options:
                raise ValueError(
                    f"--{name} has no meaning for the task {self.config.task.name}."
                )

    def set_directory(self, directory: str) -> None:
        """Read local data files from another folder than data.directory."""
        with self.config.unlocked():
            self.config.data.directory = directory

    def spec(
        self, rows: int | None = None, length: int | None = None
    ) -> dict[str, ArraySpec]:
        """Return the arrays of a batch of so many rows and tokens per row.

        By default the largest batch that the config allows.
        """
        raise NotImplementedError

    def build(self, *, rngs: nnx.Rngs) -> nnx.Module:
        """Return a new model of the config, with the vocabulary sizes of `folder`."""
        raise NotImplementedError

    def new_parameters(self, folder: Path) -> tuple[str, ...]:
        """Return parts of the model that train.init_from must not copy.

        Args:
            folder: the vocabularies of the run that is started from.
        """
        return ()

    def batches(self, examples: Examples, seeds: list[int]) -> Batches:
        """Return the training batches of trials with these seeds."""
        raise NotImplementedError

    def evaluation_batches(self, examples: Examples, packed: bool = True) -> list:
        """Return every example once, in batches without a trial axis.

        With `packed` False each row holds one example, and the items of the list are
        (indices of the examples, batch).
        """
        raise NotImplementedError

    def loss(self, model, batch: dict, **options) -> tuple[jax.Array, jax.Array]:
        """Return the loss summed over a batch, and its weight.

        `training.step.loss_and_gradient` divides one by the other.

        Args:
            model: of one trial, in the dtype that it computes in.
            batch: of one trial.
            options: `label_smoothing`, and those of `models.Transformer.hidden`.
        """
        raise NotImplementedError

    def evaluate(self, run: Run, examples: Examples, **options) -> list[dict]:
        """Score every trial: one row each, from the name of a metric to its value.

        A row may also have `predictions` (one string per example), `signatures` of the
        metrics, and the decoding `options` that were used.

        Args:
            options: `trials`, which to score (default: all); `quick`, as in training;
                and those in the task's `options`.
        """
        raise NotImplementedError

    def predict(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Answer lines of text.

        Args:
            options: `trial`, which to use; `first`, the number of the first line; and
                those in the task's `options`.
        """
        raise NotImplementedError

    def score_lines(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Return log-probability (nats), tab, number of tokens for each line."""
        raise ValueError(f"The task {self.config.task.name} has no --score.")

    def score_tokens(self, run: Run, lines: Sequence[str], **options) -> Iterator[str]:
        """Return the tokens of each line and their log-probabilities, as JSON."""
        raise ValueError(f"The task {self.config.task.name} has no --score_tokens.")

    def token_strings(self, field: str, ids) -> list[str]:
        """Return the text of each token of a field, as labels in figures."""
        raise NotImplementedError

    def labels(self, fields: dict[str, list[int]]) -> dict[str, list[str]]:
        """Return the text of each token by field, and of what a decoder reads."""
        found = {name: self.token_strings(name, ids) for name, ids in fields.items()}
        if "target" in fields:
            read = [self.config.model.bos, *fields["target"][:-1]]
            found["decoder input"] = self.token_strings("target", read)
        return found

    def fields_of_text(
        self, run: Run, source: str, target: str | None, trial: int
    ) -> dict[str, list[int]]:
        """Return the token ids by field of a text of one's own; see `Run.attention`.

        Raises:
            ValueError: it is empty or longer than the model takes, or has a target
                where the task has none.
        """
        if target is not None:
            raise ValueError(f"The task {self.config.task.name} has no target texts.")
        (ids,) = self.encode_texts([source])
        fields = {"source" if self.config.model.num_encoder_layers else "target": ids}
        self.check_length(fields, "The text")
        return fields

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        """Return the token ids of texts of one's own."""
        raise NotImplementedError

    def check_length(self, fields: dict[str, list[int]], what: str) -> None:
        """Raise a ValueError for a text without tokens or with too many."""
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
        """Return the token ids by field of an example whose attention is drawn.

        What the model generates is its own output, not the reference.
        """
        return {name: field[index].tolist() for name, field in examples.fields.items()}

    def bootstrap(self, metric: Metric, systems: dict[str, list[str]], text: dict):
        """Return intervals and p-values over test examples, by system, or None.

        Args:
            systems: predictions by name; the first is the baseline.
            text: as `read` gives it.

        Returns:
            None, or by system (value, half width of its 95 % interval, p of no
            difference to the baseline or None for the baseline itself), as stored.
        """
        return None
