"""Statistics of the heads of every arm of a sweep."""

from collections.abc import Callable
from pathlib import Path

from headcount.runtime.logging import Progress
from headcount.sweeps.plan import Group
from headcount.sweeps.settings import Options, open_sweep
from headcount.sweeps.store import TRAINED, Sweep, read_run
from headcount.tasks import Run


def open_trained(workdir: Path, task_file: Path | None) -> Sweep:
    """Open a sweep of which at least one reported trial is trained.

    Raises:
        ValueError: there is none, or files are damaged.
    """
    sweep = open_sweep(Options("report", workdir, task_file))
    if not any(is_trained(sweep, group) for group in sweep.groups):
        raise ValueError(
            f"{workdir} has no checkpoint of a reported trial whose training is over; "
            f"python sweep.py run --workdir={workdir} goes on."
        )
    return sweep


def is_trained(sweep: Sweep, group: Group) -> bool:
    """Return whether a group has reported trials, trained, with checkpoints."""
    folder = sweep.folder(group)
    if group.trials[0].is_search or not (folder / "checkpoints").exists():
        return False  # trials taken over by --finished have no checkpoints
    run = read_run(folder)
    return run is not None and run["status"] in TRAINED


def measure_arms(
    sweep: Sweep,
    load: Callable[[Path], Run],
    measure: Callable[[Run, int], list[dict]],
) -> list[dict]:
    """Return the rows that `measure` finds for the reported trials of all arms.

    Trials that diverged or are not trained yet are left out. Rows have the additional
    columns arm and seed, and are in the order of the plan.

    Args:
        load: returns the run in a folder.
        measure: a function of a run and the index of a trial.
    """
    arms, found = {trial.id: trial.arm for trial in sweep.plan.trials}, {}
    groups = [group for group in sweep.groups if is_trained(sweep, group)]
    progress = Progress(len(groups), unit="group")
    for done, group in enumerate(groups):
        progress.update(done, group.name)
        run = load(sweep.folder(group))
        for index, trial in enumerate(group.trials):
            if trial.id in arms and run.diverged_at[index] is None:
                about = {"arm": arms[trial.id], "seed": trial.seed}
                found[trial.id] = [about | row for row in measure(run, index)]
    progress.close()
    return [row for key in arms for row in found.get(key, ())]
