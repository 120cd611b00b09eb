"""The tasks that a model can be trained on. `TASKS` has every task by name.

To add a task of your own, write a Python file that adds it to `TASKS`, and pass it as
--task_file=FILE.py. A config file can add a task, too.
"""

import importlib.util
import sys
from pathlib import Path

from headcount.configs.validation import choose
from headcount.tasks.base import LOSS, Metric, Run, Task
from headcount.tasks.classification import Classification
from headcount.tasks.language_model import LanguageModel
from headcount.tasks.masked_language_model import MaskedLanguageModel
from headcount.tasks.recall import Recall
from headcount.tasks.tagging import Tagging
from headcount.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {
    "translation": Translation,
    "language_model": LanguageModel,
    "masked_language_model": MaskedLanguageModel,
    "tagging": Tagging,
    "classification": Classification,
}
# Classes that replace the above for one corpus, by (task.name, data.name).
OF_CORPUS: dict[tuple[str, str], type[Task]] = {("language_model", "recall"): Recall}


def make_task(config, folder: Path | None = None) -> Task:
    """Make the task of a config; see `Task` for the folder.

    Raises:
        ValueError: there is no such task, or the config does not fit it.
    """
    name = config.task.name
    if name not in TASKS:
        raise ValueError(
            f"task.name must be one of {', '.join(TASKS)}, got {name!r}; add a task of "
            f"your own with --task_file=FILE.py."
        )
    kind = OF_CORPUS.get((name, config.data.name), TASKS[name])
    task = kind(config, folder)
    check_class(name, task)
    best, metrics = config.train.best_metric, [m.name for m in task.metrics]
    if best is not None:
        choose("train.best_metric", best, metrics)
    return task


def check_class(name: str, task: Task) -> None:
    """Raise a ValueError unless a task, which may be of one's own, can be trained."""
    kind = type(task)
    metrics = getattr(task, "metrics", None)
    is_tuple = isinstance(metrics, tuple | list)
    if not is_tuple or not metrics or not all(isinstance(m, Metric) for m in metrics):
        raise ValueError(
            f"The class {kind.__name__} of the task {name} must set `metrics` to a "
            f"tuple of at least one Metric, as in metrics = (LOSS,), got {metrics!r}."
        )
    for member in ("load", "loss", "evaluate"):
        if getattr(kind, member) is getattr(Task, member):
            raise ValueError(
                f"The class {kind.__name__} of the task {name} must define `{member}`."
            )


def best_metric(task: Task) -> Metric:
    """Return the metric that selects the best models on dev (train.best_metric)."""
    name = task.config.train.best_metric
    return next(m for m in task.metrics if name in (None, m.name))


def import_file(path: Path) -> None:
    """Execute a Python file that adds a task to `TASKS`, or to `MERGE_RULES`.

    Use this only for files that the user names on the command line, never for a path
    that was read from a file.

    Raises:
        ValueError: it is not a Python file, or executing it fails.
    """
    if path.suffix != ".py" or not path.is_file():
        raise ValueError(f"--task_file={path} is not a Python file.")
    spec = importlib.util.spec_from_file_location(f"task_file_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything
        raise ValueError(
            f"--task_file={path}: {type(error).__name__}: {error}"
        ) from error


__all__ = [
    "LOSS",
    "TASKS",
    "Metric",
    "Run",
    "Task",
    "best_metric",
    "import_file",
    "make_task",
]
