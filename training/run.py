"""Load a trained run, or write a model as one.

run = load("runs/numbers")
list(run.task.predict(run, ["two hundred and six"]))
"""

import shlex
from pathlib import Path

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import ConfigDict

from headcount.configs.run import load_config
from headcount.configs.validation import choose, flat
from headcount.data import tokenizers
from headcount.models import cost
from headcount.runtime import distributed, sharding
from headcount.runtime.workdir import environment, read_json, record, set_status
from headcount.tasks import Run, make_task
from headcount.training.checkpoint import Checkpoints
from headcount.training.restore import READERS, restore_parameters
from headcount.training.trials import check_trials, head_gates

CHECKPOINT = flags.DEFINE_enum(
    "checkpoint",
    "best",
    list(READERS),
    "Parameters to use: of the best evaluation by train.best_metric, of the last "
    "checkpoint, or the mean of the checkpoints kept (train.keep_checkpoints).",
)


def load(workdir: Path | str, which: str = "best") -> Run:
    """Load a run with its "best", "last" or "average" parameters.

    Also set JAX's global mesh to one that shards the trials over the devices.

    Raises:
        ValueError, OSError: there is no run, or it has no intact checkpoint.
    """
    choose("which", which, READERS)
    distributed.check_devices()
    workdir = Path(workdir)
    config = read_config(workdir)
    task = make_task(config, workdir / "tokenizer")
    model = cost.abstract(task.build)
    graph, abstract_params = nnx.split(model)
    path = workdir / "trials.json"
    trials = read_json(path)
    check_trials(path, trials, flat(config.to_dict()))
    check_trained(workdir, config.task.name, len(trials), cost.parameters(model))
    params, steps, diverged_at = restore_parameters(
        workdir, which, len(trials), abstract_params
    )
    axes = {"trial": None, "data": -1, "model": 1}
    mesh = sharding.make_mesh(axes, len(trials), jax.device_count())
    jax.set_mesh(mesh)
    by_trial = sharding.named(mesh, "trial")
    return Run(
        config=config,
        graph=graph,
        params=jax.tree.map(lambda leaf: sharding.put(leaf, by_trial), params),
        trials=trials,
        head_gates=head_gates(flat(config.to_dict()), trials),
        step=[int(step) for step in steps],
        diverged_at=[int(step) or None for step in diverged_at],
        task=task,
        mesh=mesh,
    )


def read_config(workdir: Path) -> ConfigDict:
    """Return the config of the run in a workdir.

    Raises:
        FileNotFoundError: there is no run.
        ValueError: its config.json is damaged or was edited, or the run has another
            format version.
    """
    path = workdir / "config.json"
    if (workdir / "sweep.json").exists():
        raise FileNotFoundError(
            f"{workdir} holds a sweep; its runs are the folders in "
            f"{workdir / 'groups'}."
        )
    if not path.exists():
        example = ["python", "train.py", "--config=configs/numbers.py"]
        raise FileNotFoundError(
            f"{workdir} holds no run (there is no config.json in it); train one with "
            f"{shlex.join([*example, f'--workdir={workdir}'])}"
        )
    read_json(workdir / "run.json")  # checks the format version
    return load_config(path)


def check_trained(workdir: Path, task: str, trials: int, num_parameters: int) -> None:
    """Raise a ValueError if a run was trained with another task, model or vocabulary.

    This detects edited files: shapes alone don't, because another task may have a model
    of the same shapes, whose answers would be meaningless.
    """
    path = workdir / "run.json"
    facts = read_json(path)
    if isinstance(facts.get("task"), dict):
        facts["task"] = facts["task"].get("name")
    config, folder = workdir / "config.json", workdir / "tokenizer"
    model = f"are of a model of {num_parameters:,} parameters"
    for text, key, actual in (
        (f"{config} has task.name={task}", "task", task),
        (f"{workdir / 'trials.json'} lists {trials} trials", "trials", trials),
        (f"{config} and {folder} {model}", "num_parameters", num_parameters),
        (f"{folder} has other vocabularies", "tokenizer", tokenizers.checksums(folder)),
    ):
        recorded = facts.get(key, actual)
        if recorded != actual:
            recorded = "other checksums" if key == "tokenizer" else recorded
            raise ValueError(
                f"{text}, but {path} says {key}: {recorded}, recorded in training; "
                f"restore the file that was edited."
            )


def write_finished(
    workdir: Path, config: dict, settings: dict, params, step: int = 0
) -> int:
    """Write one model as a finished run with one trial; return its parameter count.

    Args:
        workdir: an existing folder.
        config: the resolved config, nested.
        settings: what the trial changes in it, by config key.
        params: the parameters, without a trial axis.
        step: the update at which they were the best.
    """
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    params = jax.tree.map(lambda leaf: np.asarray(leaf)[None], params)
    zero, steps = np.zeros(1, np.int32), np.array([step], np.int32)
    checkpoints = Checkpoints(workdir, 1)
    checkpoints.save(
        step,
        params=params,
        trials={"step": steps, "diverged_at": zero, "stopped_at": zero},
        best={"params": params, "score": np.zeros(1), "step": steps},
    )
    checkpoints.wait()
    checkpoints.close()
    record(workdir, config, [settings], {"num_parameters": count, **environment()})
    set_status(workdir, "finished")
    return count


def choose_trial(run: Run, flag) -> int:
    """Return the value of --trial.

    Raises:
        ValueError: the run has no such trial.
    """
    if not 0 <= flag.value < len(run.trials):
        raise ValueError(
            f"--trial must be below {len(run.trials)}, the number of trials in the "
            f"run, got {flag.value}."
        )
    return flag.value


def choose_trials(run: Run, flag) -> list[int]:
    """Return the trial that --trial names; by default, all that have not diverged.

    If all trials have diverged, the default is the flag's default value.
    """
    sound = [trial for trial, at in enumerate(run.diverged_at) if at is None]
    return [choose_trial(run, flag)] if flag.present or not sound else sound
