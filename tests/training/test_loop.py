"""The training loop: dispatches, hooks, dev scores of each trial, patience."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount.configs.base import get_config
from headcount.data.examples import ArraySpec, Examples, Ragged
from headcount.runtime import sharding
from headcount.tasks.base import LOSS, Metric
from headcount.training import loop
from headcount.training.loop import Hook, default_hooks, evaluate, fit, take_sample
from headcount.training.selection import initial_best
from headcount.training.step import TrainState

BLEU = Metric("bleu", "BLEU", "points")


class Task:
    """A task that gives each trial the scores in `rows`, and notes what was asked."""

    metrics = (BLEU, LOSS)

    def __init__(self, config, rows):
        self.config, self.rows, self.asked = config, rows, []

    def evaluate(self, run, examples, trials, quick):
        self.asked.append((run.step, list(trials), quick))
        return [self.rows[trial] for trial in trials]


class Writer:
    """A writer that keeps the rows."""

    def __init__(self):
        self.rows = []

    def write(self, step, trial, **values):
        self.rows.append({"step": step, "trial": trial, **values})


class Batches:
    """Batches whose only token is the number of the step."""

    spec = {"target": ArraySpec((1, 1)), "target_segments": ArraySpec((1, 1))}
    steps_per_epoch = 1.0

    def part(self, step, trials=slice(None), rows=slice(None)):
        shape = len(range(2)[trials]), len(range(1)[rows]), 1
        ones = np.ones(shape, np.int32)
        return {"target": step * ones, "target_segments": ones}


class Saved:
    """Checkpoints that only count."""

    def __init__(self):
        self.steps = []

    def save(self, step, **items):
        self.steps.append(step)

    def wait(self):
        pass


def train_steps(state, hyperparameters, batch, number, *, static):
    """Add each step's token to the parameters; trial 1 diverges at step 6."""
    tokens = jnp.asarray(batch["target"])[:, :, 0, 0]
    k = tokens.shape[1]
    valid = jnp.arange(k) < number
    at_six = (tokens == 5) & (jnp.arange(2)[:, None] == 1) & valid
    frozen = state.frozen[:, None] | (jnp.cumsum(at_six, 1) > 0)
    updated = valid & ~frozen
    new = state._replace(
        step=state.step + updated.sum(1),
        params={"w": state.params["w"] + (tokens * updated).sum(1)[:, None]},
        diverged_at=jnp.where(at_six.any(1), 6, state.diverged_at),
    )
    ones = jnp.ones((2, k))
    names = ("loss", "weight", "gradient_norm", "learning_rate")
    metrics = dict.fromkeys(names, ones) | {"updated": updated, "diverged": at_six}
    return new, metrics | {"tokens": {"target": ones.astype(int)}}


def make_trainer(monkeypatch, rows=None, start=0, **settings):
    """Return a trainer of two trials without a model."""
    monkeypatch.setattr(loop, "train_steps", train_steps)
    monkeypatch.setattr(loop, "say", lambda text: None)
    config = get_config()
    config.train.update(settings)
    zeros = jnp.zeros(2, jnp.int32)
    # two arrays: `keep_best` donates those of the best
    state, best = (
        TrainState(zeros, {"w": jnp.zeros((2, 1))}, None, zeros, zeros)
        for _ in range(2)
    )
    rows = rows or {0: {"bleu": 1.0, "loss": 1.0}, 1: {"bleu": 2.0, "loss": 2.0}}
    return loop.Trainer(
        config=config,
        workdir=None,
        task=Task(config, rows),
        trials=[{"seed": 0}, {"seed": 1}],
        hyperparameters={"head_gates": {}},
        static=SimpleNamespace(graph=None),
        batches=Batches(),
        dev=(),
        train_sample=[],
        state=state,
        best=initial_best(best.params, 2),
        step=start,
        checkpoints=Saved(),
        writer=Writer(),
        flops=lambda: 1.0,
        compile_clock=SimpleNamespace(seconds=0.0),
        started=0.0,
    )


class Profile:
    """A profile that is off."""

    def ends(self, step):
        return ()

    def is_due(self, step):
        return False

    def close(self):
        pass


def run(trainer, hooks, stop_at=None):
    """Train on a mesh of one device; a signal may stop it before a dispatch."""
    stop = SimpleNamespace(reached=lambda count: count == stop_at)
    mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), 1, 1, jax.devices()[:1])
    with jax.set_mesh(mesh):
        fit(trainer, hooks, stop, Profile())


def noted(every, seen):
    return Hook(every, lambda trainer: seen.append(trainer.step))


@pytest.mark.parametrize("k", [1, 4, 8])
def test_hooks_are_called_at_their_multiples_and_at_the_end(monkeypatch, k):
    trainer = make_trainer(monkeypatch, num_steps=14, steps_per_dispatch=k)
    three, five = [], []
    run(trainer, [noted(3, three), noted(5, five)])
    assert three == [3, 6, 9, 12, 14] and five == [5, 10, 14]
    assert trainer.checkpoints.steps == [14]


def test_every_step_is_trained_on_its_own_batch_once(monkeypatch):
    trainer = make_trainer(monkeypatch, num_steps=14, start=3, steps_per_dispatch=4)
    run(trainer, [])
    assert trainer.state.params["w"][0] == sum(range(3, 14))
    assert trainer.state.step.tolist()[0] == 11


def test_a_diverged_trial_is_logged_once_and_no_longer_evaluated(monkeypatch):
    trainer = make_trainer(monkeypatch, num_steps=12, steps_per_dispatch=4)
    run(trainer, [Hook(4, evaluate)])
    diverged = [row for row in trainer.writer.rows if "diverged_at" in row]
    assert diverged == [{"step": 6, "trial": 1, "diverged_at": 6}]
    asked = [(step[0], trials) for step, trials, _ in trainer.task.asked]
    assert asked == [(4, [0, 1]), (8, [0]), (12, [0])]
    assert trainer.state.params["w"][1] == sum(range(5))


def test_training_ends_when_all_trials_are_frozen(monkeypatch):
    trainer = make_trainer(monkeypatch, num_steps=1000, eval_every_steps=2, patience=3)
    run(trainer, [Hook(2, evaluate)])
    stopped = {r["trial"]: r["step"] for r in trainer.writer.rows if "stopped_at" in r}
    assert stopped == {0: 8}  # best at 2, then three evaluations without a better one
    assert trainer.step < 20 and trainer.checkpoints.steps == [trainer.step]


def test_a_stop_signal_saves_and_ends_before_the_next_dispatch(monkeypatch):
    trainer = make_trainer(monkeypatch, num_steps=50, steps_per_dispatch=4)
    run(trainer, [Hook(1000, evaluate)], stop_at=3)
    assert trainer.step == 1 + 2 * 4  # the first dispatch has one step
    assert trainer.checkpoints.steps == [9] and trainer.task.asked == []


def test_dev_scores_are_written_per_trial_and_select_the_best(monkeypatch):
    rows = {0: {"bleu": 30.0, "loss": 2.0}, 1: {"bleu": 20.0, "loss": 1.0}}
    trainer = make_trainer(monkeypatch, rows, num_steps=4)
    evaluate(trainer)
    wanted = [
        {"step": 0, "trial": trial} | {f"dev_{name}": x for name, x in row.items()}
        for trial, row in rows.items()
    ]
    assert trainer.writer.rows == wanted
    trainer.step, trainer.state = (
        2,
        trainer.state._replace(params={"w": jnp.ones((2, 1))}),
    )
    trainer.task.rows = {0: {"bleu": 29.0, "loss": 1.0}, 1: {"bleu": 21.0, "loss": 3.0}}
    evaluate(trainer)
    assert trainer.best["step"].tolist() == [0, 2]
    assert trainer.best["params"]["w"].tolist() == [[0], [1]]
    assert all(quick for *_, quick in trainer.task.asked)


def test_the_loss_on_a_part_of_the_training_split_is_written_beside_that_on_dev(
    monkeypatch,
):
    rows = {0: {"bleu": 30.0, "loss": 2.0}, 1: {"bleu": 20.0, "loss": 1.0}}
    trainer = make_trainer(monkeypatch, rows)
    trainer.train_sample, asked = ["a batch"], []
    losses = np.array([0.5, 1.25])
    monkeypatch.setattr(
        loop, "heldout_loss", lambda run, batches: asked.append(batches) or losses
    )
    evaluate(trainer)
    found = [(x["train_loss"], x["generalization_gap"]) for x in trainer.writer.rows]
    assert found == [(0.5, 1.5), (1.25, -0.25)] and asked == [["a batch"]]


def of_lengths(*lengths):
    """Return examples of these lengths, whose tokens are all different."""
    tokens = np.split(1 + np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    text = [" ".join(map(str, ids)) for ids in tokens]
    return Examples("train", {"target": Ragged.of(tokens)}, {"text": text})


class ByExample:
    """A task with a batch per two tokens."""

    def evaluation_batches(self, examples):
        assert len(examples.text["text"]) == len(examples)
        for ids in examples.fields["target"]:
            yield from ids.reshape(-1, 2)


def test_the_part_of_the_training_split_is_spread_over_it_and_as_large_as_dev():
    many, long, dev = of_lengths(*[2] * 9), of_lengths(18), of_lengths(2, 2, 2)
    one = of_lengths(6)
    for train, held_out in ((many, dev), (long, one), (many, one)):
        batches = take_sample(ByExample(), train, held_out)
        assert np.array(batches).tolist() == [[1, 2], [9, 10], [17, 18]]
    assert len(take_sample(ByExample(), dev, many)) == 3


def test_a_metric_that_a_task_leaves_out_is_not_written(monkeypatch):
    """As chrF, which takes long, where it does not select."""
    trainer = make_trainer(monkeypatch, {0: {"loss": 1.0}, 1: {"loss": 2.0}})
    trainer.config.train.best_metric = "loss"
    evaluate(trainer)
    assert all(
        row.keys() == {"step", "trial", "dev_loss"} for row in trainer.writer.rows
    )


def test_default_hooks_log_evaluate_and_save_at_their_intervals(monkeypatch):
    every = {"log_every_steps": 4, "eval_every_steps": 6, "checkpoint_every_steps": 5}
    trainer = make_trainer(monkeypatch, num_steps=13, steps_per_dispatch=3, **every)
    run(trainer, default_hooks(trainer.config, SimpleNamespace(update=lambda *_: None)))
    of_trial = [row for row in trainer.writer.rows if row["trial"] == 0]
    assert [row["step"] for row in of_trial if "loss" in row] == [4, 8, 12, 13]
    assert [row["step"] for row in of_trial if "dev_loss" in row] == [6, 12, 13]
    assert trainer.checkpoints.steps == [5, 10, 13, 13]
