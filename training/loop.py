"""The training loop: update and call hooks at intervals until the run is done."""

import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from headcount.data.batches import dispatch_spans, prefetched
from headcount.data.examples import Examples
from headcount.models.maps import head_summaries
from headcount.runtime import sharding
from headcount.runtime.logging import Progress, clock, heartbeat, say
from headcount.runtime.profiling import CompileClock, Profile, peak_flops
from headcount.runtime.signals import StopSignal
from headcount.tasks import Run, Task, best_metric
from headcount.tasks.base import Batches
from headcount.tasks.heldout_loss import heldout_loss
from headcount.training import selection
from headcount.training.checkpoint import Checkpoints
from headcount.training.metrics import MetricsWriter, Window, mean_and_sd
from headcount.training.step import Static, TrainState, checkpoint_items, train_steps
from headcount.training.trials import describe_trial

ROWS_OF_HEADS = 8  # dev rows that head summaries are computed on; bounds the memory


@dataclasses.dataclass
class Trainer:
    """The state of a run in training: its config, data, models and progress."""

    config: ConfigDict
    workdir: Path
    task: Task
    trials: list[dict]  # see `training.trials`
    hyperparameters: dict  # arrays of shape R; see `train_steps`
    static: Static
    batches: Batches
    dev: Examples
    train_sample: list[dict]  # batches of the training split; see `take_sample`
    state: TrainState
    best: dict  # see `selection.initial_best`
    step: int  # updates done
    checkpoints: Checkpoints
    writer: MetricsWriter
    flops: Callable[[], float]  # of an update of one trial
    compile_clock: CompileClock
    started: float  # time.monotonic() at the launch
    window: Window = dataclasses.field(init=False)
    frozen: np.ndarray = dataclasses.field(init=False)  # R: no longer updated
    unread: list = dataclasses.field(default_factory=list)  # (first step, number, ...)

    def __post_init__(self):
        self.window = Window(self.batches.spec)
        self.frozen = np.array(sharding.fetch(self.state.frozen))

    @property
    def num_steps(self) -> int:
        """Total number of updates of the run."""
        return self.config.train.num_steps

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train: no step, or no trial."""
        return self.step >= self.num_steps or bool(self.frozen.all())

    def is_due(self, every: int) -> bool:
        """Return whether an action with this interval is due at the current step."""
        return self.step % every == 0 or self.step == self.num_steps

    def update(self, batch: dict, number: int) -> None:
        """Dispatch the updates of a span; read the metrics of the previous span."""
        self.state, metrics = train_steps(
            self.state, self.hyperparameters, batch, number, static=self.static
        )
        self.unread.append((self.step, number, sharding.to_all(metrics)))
        self.step += number
        self.read_metrics(keep=1)  # one span late: the device never waits for Python
        if self.window.compiling:
            self.read_metrics()
            say(f"First step {clock(time.monotonic() - self.started)} after launch.")
            if peak := peak_flops():
                self.window.ideal_seconds = self.flops() / peak
            self.window.start_clock()

    def read_metrics(self, keep: int = 0) -> None:
        """Wait for and read the metrics of all but the last `keep` spans."""
        while len(self.unread) > keep:
            first, number, metrics = self.unread.pop(0)
            metrics = jax.tree.map(np.asarray, metrics)
            for index in range(number):
                of_step = jax.tree.map(lambda x, i=index: x[:, i], metrics)
                diverged, at = self.window.add(of_step), first + index + 1
                reason = "diverged: its loss or gradient is not finite"
                self.freeze(diverged, at, reason, diverged_at=at)

    def freeze(self, trials, at: int, reason: str, **row) -> None:
        """Mark trials as frozen, and log why."""
        for trial in trials.tolist():
            self.frozen[trial] = True
            self.writer.write(at, trial, **row)
            say(
                f"step {at}: {describe_trial(self.trials, trial)} {reason}; now frozen."
            )

    @contextlib.contextmanager
    def paused(self):
        """Exclude this block from throughput timing, after pending steps finish."""
        self.read_metrics()
        with self.window.paused():
            yield

    def run(self) -> Run:
        """Return the run with its current parameters, valid until the next update."""
        R = len(self.trials)
        return Run(
            config=self.config,
            graph=self.static.graph,
            params=self.state.params,
            trials=self.trials,
            head_gates=self.hyperparameters["head_gates"],
            step=[self.step] * R,
            diverged_at=[None] * R,
            task=self.task,
            mesh=jax.sharding.get_mesh(),
        )


class Hook(NamedTuple):
    """A function to call every `every` steps and after the last step.

    If it returns True, training stops.
    """

    every: int
    call: Callable[[Trainer], Any]


def fit(
    trainer: Trainer, hooks: list[Hook], stop: StopSignal | None, profile: Profile
) -> None:
    """Train until num_steps, then save.

    Training ends early at a signal, if a hook returns True, or if all trials are
    frozen.
    """
    settings = trainer.config.train
    k, ends = settings.steps_per_dispatch, profile.ends(trainer.step)
    # dispatch the first step on its own, so that errors show early
    once, intervals = {trainer.step + 1, *ends}, [hook.every for hook in hooks]
    spans = dispatch_spans(trainer.step, trainer.num_steps, k, intervals, once)
    mesh, R = jax.sharding.get_mesh(), len(trainer.trials)
    num_rows = next(iter(trainer.batches.spec.values())).shape[0]
    part = sharding.part_here(mesh, R, num_rows)
    feed, stopped = prefetched(trainer.batches, spans, k, part[:2]), False
    try:
        for count, (_, number) in enumerate(spans):
            signalled = stop is not None and stop.reached(count)
            if signalled or stopped or trainer.frozen.all():
                break
            if profile.is_due(trainer.step):
                with trainer.paused():  # writing a trace takes many seconds
                    profile.at(trainer.step, trainer.state)
            with trainer.window.waiting():
                batch = sharding.place_batch(next(feed), part)
            trainer.update(batch, number)
            for hook in hooks:
                if trainer.is_due(hook.every) and hook.call(trainer) is True:
                    stopped = True
        trainer.read_metrics()
        save(trainer)
        trainer.checkpoints.wait()
    finally:
        profile.close()
        feed.close()


def default_hooks(config: ConfigDict, progress: Progress) -> list[Hook]:
    """Return the hooks of a config: log, evaluate, save, in this order."""

    def log_and_show(trainer):
        log(trainer)
        progress.update(trainer.step, trainer.window.text)

    return [
        Hook(config.train.log_every_steps, log_and_show),
        Hook(config.train.eval_every_steps, evaluate),
        Hook(config.train.checkpoint_every_steps, save),
    ]


def log(trainer: Trainer) -> None:
    """Write a row of training metrics for every trial."""
    trainer.read_metrics()
    compiled = trainer.compile_clock.seconds
    for trial, row in trainer.window.rows().items():
        trainer.writer.write(trainer.step, trial, **row, compile_seconds=compiled)


def evaluate(trainer: Trainer) -> None:
    """Score the trials on dev, keep the best parameters, and apply patience."""
    config, step, R = trainer.config.train, trainer.step, len(trainer.trials)
    with trainer.paused():
        alive = np.flatnonzero(~trainer.frozen).tolist()
        with heartbeat(f"step {step}: still scoring {len(trainer.dev)} dev examples"):
            rows = trainer.task.evaluate(
                trainer.run(), trainer.dev, trials=alive, quick=True
            )
            train_loss = trainer.train_sample and heldout_loss(
                trainer.run(), trainer.train_sample
            )
        rows = dict(zip(alive, rows, strict=True))
        metrics = [
            m for m in trainer.task.metrics if all(m.name in r for r in rows.values())
        ]
        for trial, row in rows.items():
            scores = {f"dev_{m.name}": row[m.name] for m in metrics}
            if trainer.train_sample:
                scores["train_loss"] = float(train_loss[trial])
                scores["generalization_gap"] = row["loss"] - scores["train_loss"]
            trainer.writer.write(step, trial, **scores)
        if config.log_heads and rows:
            log_heads(trainer, alive)
        shown = [
            mean_and_sd(f"dev {m.label}", [row[m.name] for row in rows.values()])
            for m in metrics
        ]
        if rows:
            of = f" ({len(rows)} of {R} trials)" * (len(rows) < R)
            say(f"step {step}{of}: " + "  ".join(shown))
        metric = best_metric(trainer.task)
        scores = selection.ranks(rows, metric, R)
        trainer.best = selection.keep_best(
            trainer.best, trainer.state.params, step, scores
        )
        if config.patience is not None:
            since = config.patience * config.eval_every_steps
            trainer.state, late = selection.stop_without_progress(
                trainer.state, trainer.best, step - since, step
            )
            reason = f"had no better dev {metric.label} in {since} steps"
            trainer.freeze(late, step, reason, stopped_at=step)


def take_sample(task: Task, examples: Examples, dev: Examples) -> list[dict]:
    """Return evaluation batches of evenly spaced parts of the training split.

    There are at most as many batches as dev has. Dev may have fewer examples that are
    longer, as a language model's documents are.
    """
    tokens, dev_tokens = (
        max(f.tokens.size for f in x.fields.values()) for x in (examples, dev)
    )
    count = max(len(dev), -(-dev_tokens * len(examples) // tokens))
    chosen = examples.take(evenly_spaced(len(examples), count))
    batches = [*task.evaluation_batches(chosen)]
    count = sum(1 for _ in task.evaluation_batches(dev))
    return [batches[i] for i in evenly_spaced(len(batches), count)]


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """Return `count` indices from 0 to total - 1; all of them if there are fewer."""
    return np.linspace(0, total - 1, min(total, count)).round().astype(int)


def log_heads(trainer: Trainer, trials: list[int]) -> None:
    """Log statistics per head on a few dev rows; see `head_summaries`."""
    run = trainer.run()
    batch = next(iter(trainer.task.evaluation_batches(trainer.dev)))
    first_rows = {name: array[:ROWS_OF_HEADS] for name, array in batch.items()}
    summaries = sharding.fetch(
        head_summaries(run.graph, run.params, run.head_gates, first_rows)
    )
    for trial in trials:
        trainer.writer.write(
            trainer.step,
            trial,
            **{
                f"{name}/{site}.{layer}.{head}": float(values[trial, layer, head])
                for site, numbers in summaries.items()
                for name, values in numbers.items()
                for layer, head in np.ndindex(values.shape[1:])
            },
        )


def save(trainer: Trainer) -> None:
    """Write a checkpoint in the background."""
    with trainer.paused():
        items = checkpoint_items(trainer.state, trainer.best)
        trainer.checkpoints.save(trainer.step, **items)
