"""The parameters of a run: its best, its last, or the mean of its checkpoints."""

from functools import partial
from pathlib import Path

import jax
import numpy as np

from headcount.runtime import distributed as hosts
from headcount.runtime import sharding
from headcount.runtime.logging import say
from headcount.runtime.workdir import completed, differing, read_json, summary
from headcount.training.checkpoint import Checkpoints
from headcount.training.step import TrainState


def restore(workdir, which: str, num_trials: int, abstract):
    """The parameters of a run's trials, and of when they are.

    Args:
        workdir: the run's folder.
        which: a name in `READ`.
        num_trials: R.
        abstract: what one trial's parameters look like.

    Returns:
        The parameters with the trial axis R, on the host; of every trial the step that
        they are of, and the step at which it diverged, 0: it didn't.

    Raises:
        ValueError, OSError: no checkpoint yet, a damaged one, or of another model.
    """
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_trials, *leaf.shape), leaf.dtype),
        abstract,
    )
    checkpoints = Checkpoints(workdir)
    like = np.zeros(num_trials)
    items = checkpoints.restore_last(trials={"step": like, "diverged_at": like})
    marks = found(items, checkpoints)[1]["trials"]
    params, steps = READ[which](checkpoints, abstract, marks)
    checkpoints.close()
    return params, steps, marks["diverged_at"]


def begun_from(
    workdir: str, config, trials: list[dict], params, defaults: dict | None = None
):
    """The best parameters of another run, to begin with; see `with_parameters`.

    A run of one trial is where all begin; one of as many trials gives each its own.
    What else the runs' models differ in is said, and so are gates on heads. A run of
    before a key existed is taken to have its value in `defaults`, a config.

    Raises:
        ValueError, OSError: there is no such run, or its parameters do not fit
            `params`, which may be abstract.
    """
    with hosts.together():  # each reads it; a relative path may be of one alone
        there = run_at(workdir)
        theirs = read_json(there / "trials.json")
        count, num_trials = len(theirs), len(trials)
        if count not in (1, num_trials):
            raise ValueError(
                f"train.init_from={workdir} has {count} trials, and {num_trials} are "
                f"to begin with them; it must have 1 or as many."
            )
        settings = completed(read_json(there / "config.json"), defaults or {})
    other = summary(differing(settings["model"], config.model.to_dict(), "model"))
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params
    )
    try:
        found, steps, _ = restore(there, "best", count, like)
    except ValueError as error:
        differs = f" Its config differs in {other}." if other else ""
        raise ValueError(f"train.init_from={workdir}: {error}{differs}") from None
    if other:
        say(f"{workdir}, from which this begins, differs in {other}.")
    for index, trial in enumerate(trials):
        for key, gate in theirs[index % count].items():
            if key.startswith("head_gates.") and gate != trial.get(key, 1):
                say(
                    f"Trial {index} begins with parameters that were trained with "
                    f"{key}={gate}, and has {trial.get(key, 1)}; --trials sets it."
                )
    say(f"Beginning with {workdir}, step {', '.join(f'{step:g}' for step in steps)}.")
    return found


def with_parameters(state: TrainState, params) -> TrainState:
    """A state with the parameters of one trial, or of as many, instead of its own."""

    def put(ours, theirs):
        theirs = np.broadcast_to(theirs, ours.shape)
        return sharding.put(theirs, ours.sharding)

    return state._replace(params=jax.tree.map(put, state.params, params))


def run_at(workdir: str) -> Path:
    """The folder that train.init_from names; FileNotFoundError if no run is there."""
    if not (Path(workdir) / "config.json").exists():
        raise FileNotFoundError(
            f"train.init_from={workdir} holds no run (there is no config.json in it)."
        )
    return Path(workdir)


def read_best(checkpoints, abstract, marks: dict):
    """Every trial's parameters at its best evaluation, by train.best_metric."""
    like = np.zeros(len(marks["step"]))
    best = {"params": abstract, "score": like, "step": like}
    best = found(checkpoints.restore_last(best=best), checkpoints)[1]["best"]
    # what had no finite loss at any evaluation has its initial values here
    without = ~np.isfinite(best["score"]) & (marks["diverged_at"] == 0)
    if without.any() and not np.isfinite(best["score"]).any():
        raise ValueError(
            f"{checkpoints.directory} has no evaluated checkpoint yet; let train.py go "
            f"on to train.eval_every_steps, or use --checkpoint=last."
        )
    marks["diverged_at"] = np.where(without, marks["step"], marks["diverged_at"])
    return best["params"], best["step"]


def read_last(checkpoints, abstract, marks: dict):
    """The parameters of the last checkpoint; a frozen trial's are older."""
    step, items = found(checkpoints.restore_last(params=abstract), checkpoints)
    return items["params"], np.minimum(step, marks["step"])


def read_average(checkpoints, abstract, marks: dict):
    """The mean of the parameters of all checkpoints that are kept.

    A trial that stopped early counts once as it ended, however often that was saved.
    """
    total, before = None, -1
    for step in checkpoints.steps_of_all():
        items, damage = checkpoints.read_all(step, params=abstract)
        if damage is not None:
            say(f"The checkpoint of step {step} is left out: {damage}.")
            continue
        counts = np.float64((step <= marks["step"]) | (before < marks["step"]))
        add = {"params": jax.tree.map(partial(each_times, counts), items["params"])}
        add["counts"], before = counts, step
        total = add if total is None else jax.tree.map(np.add, total, add)
    counts = found(total, checkpoints)["counts"]
    mean = jax.tree.map(partial(each_times, 1 / counts), total["params"])
    say(f"Averaged {counts.max():g} checkpoints, the last of step {before}.")
    for trial in np.flatnonzero(counts < counts.max()):
        ended = f"Trial {trial} ended at step {marks['step'][trial]:g}"
        say(f"{ended}: its average is of the {counts[trial]:g} that are left of it.")
    return jax.tree.map(np.float32, mean), np.minimum(before, marks["step"])


def each_times(factors, leaf):
    """A leaf with the trial axis R in front, each trial's times its factor, float64."""
    return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))


READ = {"best": read_best, "last": read_last, "average": read_average}


def found(value, checkpoints):
    """The value, or a sentence where there was no checkpoint to read it from."""
    if value is None:
        raise FileNotFoundError(
            f"{checkpoints.directory} holds no checkpoint that can be read; "
            f"let train.py go on until it has saved one."
        )
    return value
