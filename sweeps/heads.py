"""Statistics of the heads of every arm of a sweep."""

from collections.abc import Callable
from pathlib import Path

from headcount.analysis.tables import Design
from headcount.data.examples import Examples
from headcount.runtime.logging import Progress, say
from headcount.sweeps.looks import others
from headcount.sweeps.plan import Group
from headcount.sweeps.runner import is_trained, next_command
from headcount.sweeps.store import Sweep, read_run
from headcount.sweeps.table import is_lost
from headcount.tasks import Run


def has_models(sweep: Sweep, group: Group) -> bool:
    """Return whether a group has trained models to report, with checkpoints."""
    folder = sweep.folder(group)
    if group.trials[0].is_search or not (folder / "checkpoints").exists():
        return False  # trials taken over by --finished have no checkpoints
    run = read_run(folder)
    return run is not None and run["status"] == "finished"  # not all diverged


def design(sweep: Sweep, rows: list[dict]) -> Design:
    """Return how the arms of a sweep are compared with its baseline.

    Args:
        rows: rows of the sweep's table.
    """
    return Design(
        baseline=sweep.plan.baseline.name,
        num_arms=others(sweep.plan),
        looks=sweep.looks and sweep.looks.seeds,
        earlier_seeds=sweep.settings["earlier_seeds"] or [],
        lost={row["arm"] for row in rows if is_lost(row)},
    )


def measure_arms(
    sweep: Sweep,
    load: Callable[[Path], tuple[Run, Examples]],
    measure: Callable[[Run, Examples, int], list[dict]],
) -> list[dict]:
    """Return the rows that `measure` finds for the reported trials of all arms.

    Trials that diverged, are not trained yet, have no checkpoint or can't be loaded are
    left out. Errors from loading are logged, and so are arms that lose all trials. Rows
    have the additional columns arm and seed, and are in the order of the plan.

    Args:
        load: returns the run in a folder, and examples.
        measure: a function of a run, examples and the index of a trial.

    Raises:
        ValueError, OSError: no trial is left.
    """
    arms, rows_by_trial = {trial.id: trial.arm for trial in sweep.plan.trials}, {}
    failure = None
    progress = Progress(len(sweep.groups), unit="group")
    for done, group in enumerate(sweep.groups):
        progress.update(done, group.name)
        try:
            if not has_models(sweep, group):
                continue
            run, examples = load(sweep.folder(group))
        except (ValueError, OSError) as error:
            failure = error
            say(f"Left out {group.name}: {error}")
            continue
        for index, trial in enumerate(group.trials):
            if trial.id in arms and run.diverged_at[index] is None:
                columns = {"arm": arms[trial.id], "seed": trial.seed}
                rows = measure(run, examples, index)
                rows_by_trial[trial.id] = [columns | row for row in rows]
    progress.close()
    if not rows_by_trial and failure is not None:
        raise failure
    if not rows_by_trial:
        fix = f"{next_command(sweep, 'run')} resumes it."
        if all(is_trained(sweep.folder(group)) for group in sweep.groups):
            fix = (
                "trials that --finished took over have none, so use the workdir that "
                "trained them."
            )
        raise ValueError(
            f"{sweep.workdir} has no checkpoint of a reported trial that has finished "
            f"training; {fix}"
        )
    measured = {arms[key] for key in rows_by_trial}
    if left_out := [a.name for a in sweep.plan.arms if a.name not in measured]:
        say(f"Left out, without a checkpoint to load: {', '.join(left_out)}.")
    return [row for key in arms for row in rows_by_trial.get(key, ())]
