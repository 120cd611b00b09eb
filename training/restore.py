"""Read a run's parameters: the best, the last, or the mean of its checkpoints."""

import os
from functools import partial
from pathlib import Path

import jax
import numpy as np

from headcount.runtime import distributed, sharding
from headcount.runtime.logging import say
from headcount.runtime.workdir import differences, read_json, summarize
from headcount.training.checkpoint import Checkpoints, path_name
from headcount.training.step import TrainState


def restore_parameters(workdir: Path, which: str, num_trials: int, abstract):
    """Read the parameters of a run's trials.

    Args:
        workdir: the run's folder.
        which: a name in `READERS`.
        num_trials: R.
        abstract: one trial's abstract parameters.

    Returns:
        The parameters on the host, with a leading trial axis R; the step of each
        trial's parameters; and the step at which each trial diverged, or 0.

    Raises:
        ValueError, OSError: there is no checkpoint yet, it is damaged, or it belongs to
            another model.
    """
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((num_trials, *leaf.shape), leaf.dtype),
        abstract,
    )
    checkpoints = Checkpoints(workdir)
    per_trial = np.zeros(num_trials)
    _, items = _newest(
        checkpoints, trials={"step": per_trial, "diverged_at": per_trial}
    )
    trials = items["trials"]
    restored = READERS[which](checkpoints, abstract, trials)
    checkpoints.close()
    return restored


def parameters_to_start_from(
    workdir: str, config, trials: list[dict], params, new: tuple[str, ...] = ()
) -> dict[str, np.ndarray]:
    """Read the best parameters of another run (train.init_from).

    If that run has one trial, all new trials start from it. Otherwise both runs must
    have the same number of trials, and each trial starts from its counterpart. Log
    differences between the model configs, and head gates that differ.

    Args:
        params: the new run's parameters with a leading axis R; may be abstract.
        new: parts of the model to leave out, which stay newly initialized.

    Returns:
        The other run's parameters by path, without the parts in `new`.

    Raises:
        ValueError, OSError: there is no such run, or its parameters don't fit.
    """
    with distributed.fail_together():  # a relative path may exist on some hosts only
        folder = run_folder(workdir)
        other_trials = read_json(folder / "trials.json")
        count, num_trials = len(other_trials), len(trials)
        if count not in (1, num_trials):
            raise ValueError(
                f"train.init_from={workdir} has {count} trials and this run has "
                f"{num_trials}; it must have 1 or as many."
            )
        settings = read_json(folder / "config.json")
    model_differences = summarize(
        differences(settings["model"], config.model.to_dict(), "model")
    )
    abstract = {
        path_name(path): jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if path_name(path).split(".")[0] not in new
    }
    try:
        restored, steps, diverged = restore_parameters(folder, "best", count, abstract)
    except ValueError as error:
        differs = (
            f" Its config differs in {model_differences}." if model_differences else ""
        )
        raise ValueError(f"train.init_from={workdir}: {error}{differs}") from None
    lost = [i for i in range(count) if diverged[i] and not steps[i]]
    if lost:
        raise ValueError(
            f"train.init_from={workdir}: its trials {', '.join(map(str, lost))} "
            f"diverged before an evaluation; they have no parameters to start from."
        )
    if model_differences:
        say(
            f"The model of {workdir}, whose parameters this run starts from, differs: "
            f"{model_differences}."
        )
    for index, trial in enumerate(trials):
        for key, gate in other_trials[index % count].items():
            if key.startswith("head_gates.") and gate != trial.get(key, 1):
                say(
                    f"Trial {index} starts from parameters that were trained with "
                    f"{key}={gate}, and has {trial.get(key, 1)}; --trials sets it."
                )
    say(f"Starting from {workdir}, step {', '.join(f'{step:g}' for step in steps)}.")
    if new:
        say(f"Newly initialised, as {workdir} has none that fits: {', '.join(new)}.")
    return restored


def with_parameters(state: TrainState, params: dict) -> TrainState:
    """Replace parameters of a state.

    Args:
        params: parameters by path, of one trial (used for all) or of every trial.
            Parameters that are not in it stay unchanged.
    """

    def put(path, leaf):
        replacement = params.get(path_name(path))
        if replacement is None:
            return leaf
        return sharding.put(np.broadcast_to(replacement, leaf.shape), leaf.sharding)

    changed = jax.tree_util.tree_map_with_path(put, state.params)
    return state._replace(params=changed)


def run_folder(workdir: str) -> Path:
    """Return the folder that train.init_from names.

    Raises:
        FileNotFoundError: it holds no run.
    """
    folder = Path(os.path.expanduser(workdir))
    if not workdir or not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"train.init_from={workdir} holds no run (there is no config.json in it)."
        )
    return folder


def _read_best(checkpoints, abstract, trials: dict):
    per_trial = np.zeros(len(trials["step"]))
    best = {"params": abstract, "score": per_trial, "step": per_trial}
    best = _newest(checkpoints, best=best)[1]["best"]
    # without a finite score at any evaluation, a trial's best are its initial values
    without = ~np.isfinite(best["score"]) & (trials["diverged_at"] == 0)
    if without.any() and not np.isfinite(best["score"]).any():
        raise ValueError(
            f"{checkpoints.directory} has no evaluated checkpoint yet; let train.py "
            f"run until train.eval_every_steps, or use --checkpoint=last."
        )
    diverged_at = np.where(without, trials["step"], trials["diverged_at"])
    return best["params"], best["step"], diverged_at


def _read_last(checkpoints, abstract, trials: dict):
    step, items = _newest(checkpoints, params=abstract)
    return items["params"], np.minimum(step, trials["step"]), trials["diverged_at"]


def _read_average(checkpoints, abstract, trials: dict):
    """Average all kept checkpoints.

    A trial that stopped early repeats its final parameters in all later checkpoints;
    they count once.
    """
    total, previous = None, -1
    for step in checkpoints.steps_of_all():
        items = _intact(checkpoints, step, params=abstract)
        counts = np.float64((step <= trials["step"]) | (previous < trials["step"]))
        add = {"params": jax.tree.map(partial(_scale, counts), items["params"])}
        add["counts"], previous = counts, step
        total = add if total is None else jax.tree.map(np.add, total, add)
    counts = total["counts"]
    mean = jax.tree.map(partial(_scale, 1 / counts), total["params"])
    say(f"Averaged {counts.max():g} checkpoints, the last one from step {previous}.")
    for trial in np.flatnonzero(counts < counts.max()):
        say(
            f"Trial {trial} ended at step {trials['step'][trial]:g}: only "
            f"{counts[trial]:g} of these checkpoints count for it."
        )
    steps = np.minimum(previous, trials["step"])
    return jax.tree.map(np.float32, mean), steps, trials["diverged_at"]


def _scale(factors, leaf):
    return leaf * factors.reshape(-1, *[1] * (leaf.ndim - 1))


# Functions that return what `restore_parameters` does.
READERS = {"best": _read_best, "last": _read_last, "average": _read_average}


def _newest(checkpoints, **abstract) -> tuple[int, dict]:
    """Return the step and the items of the newest checkpoint."""
    steps = checkpoints.steps_of_all()
    if not steps:
        raise FileNotFoundError(
            f"{checkpoints.directory} holds no checkpoint; restore it, or let train.py "
            f"run until it has saved one."
        )
    return steps[-1], _intact(checkpoints, steps[-1], **abstract)


def _intact(checkpoints, step: int, **abstract) -> dict:
    """Return the items of a checkpoint; don't replace a damaged one by another.

    Scores of another checkpoint would pass for those of the one that was asked for.
    """
    items, damage = checkpoints.read_all(step, **abstract)
    if damage is not None:
        raise ValueError(
            f"{checkpoints.directory / str(step)} is damaged ({damage}). Restore it "
            f"from a copy or, if another checkpoint is intact, move it to "
            f"{checkpoints.damaged} to use that one; train.py does so when it resumes."
        )
    return items
