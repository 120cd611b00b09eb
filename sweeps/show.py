"""Tables on the terminal: what would run, and how far it is."""

import json
import subprocess
import tempfile
import time
from pathlib import Path

from rich.table import Table

from headcount.analysis.formatting import settings
from headcount.analysis.tables import print_table
from headcount.runtime.logging import clock, say
from headcount.sweeps.runner import train_command
from headcount.sweeps.store import Sweep, last_step, unfinished
from headcount.training.metrics import metrics_of

STATUSES = (
    "done",
    "dev scored",
    "trained",
    "training",
    "waiting",
    "diverged",
    "failed",
)


def print_list(sweep: Sweep, calibrate: bool) -> None:
    """Arms with what they cost, groups, and what the whole would take."""
    plan, searches = sweep.plan, sweep.searches()
    table = Table(
        *("arm", "seeds", *(["search"] if searches else [])),
        *("parameters", "F", "multiply-adds a token", "baseline"),
        title=f"{len(plan.arms)} arms, {sweep.num_trials()} trials, "
        f"{len(sweep.groups)} groups{' to begin with' * searches}",
    )
    for arm in plan.arms:
        table.add_row(
            *(arm.name, str(len(arm.seeds))),
            *([str(sweep.search.size(arm))] if searches else []),
            f"{arm.parameters:,}",
            str(arm.config["model"]["mlp_dim"]),
            f"{arm.flops:,}",
            "baseline" if arm.is_baseline else "",
        )
    console = print_table(table)
    for index, group in enumerate(sweep.groups):
        arms = " and ".join(dict.fromkeys(trial.arm for trial in group.trials))
        console.print(f"group {index}: {arms}, {len(group.trials)} trials")
    if searches:
        console.print("More groups follow once dev has chosen the nuisance settings.")
    total = total_operations(sweep)
    console.print(f"Training takes about {total:.3g} floating-point operations.")
    if calibrate:
        seconds = expected_seconds(sweep)
        console.print(
            f"Expected to take {clock(seconds)} on this machine, evaluation apart."
        )


def total_operations(sweep: Sweep) -> float:
    """Of all trainings, also those of the search."""
    return sum(
        arm.training_flops * (len(arm.seeds) + sweep.search.size(arm))
        for arm in sweep.plan.arms
    )


def expected_seconds(sweep: Sweep) -> float:
    """What training will take, from a few steps of the first group."""
    group = sweep.groups[0]
    say(f"Calibrating with a few steps of {group.trials[0].arm} ...")
    with tempfile.TemporaryDirectory() as folder:
        command = train_command(sweep, group)
        at = next(i for i, part in enumerate(command) if part.startswith("--workdir="))
        command[at] = f"--workdir={folder}"
        steps = group.trials[0].config["train"]["num_steps"]
        command.append("--config.train.log_every_steps=4")
        # it ends soon, too, where we are killed
        command.append(f"--config.train.num_steps={min(steps, 64)}")
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while child.poll() is None and last_step(Path(folder)) < 12:
                time.sleep(0.1)
        finally:
            child.kill()
            said = child.communicate()[1].strip().splitlines()
        paces = [row.get("steps_per_second") for row in metrics_of(Path(folder))]
    if not any(paces):  # those of dev have none, nor has a first row
        raise ValueError(
            f"The calibration failed: {said[-1] if said else 'no word'} (--nocalibrate "
            f"leaves it out)"
        )
    seconds = steps / [pace for pace in paces if pace][-1]
    arm = sweep.plan.arm(group.trials[0].arm)
    done = arm.training_flops * len(group.trials)
    return seconds / done * total_operations(sweep)


def print_status(sweep: Sweep, rows: list[dict]) -> None:
    """A row an arm: how many trials are how far, and the mean dev score."""
    metric = sweep.settings["metric"]
    present = [s for s in STATUSES if any(row["status"] == s for row in rows)]
    searches = sweep.searches()
    table = Table(
        *("arm", *present, "steps", f"dev {metric}".replace("_", " ")),
        *(["chosen"] if searches else []),
    )
    plan = sweep.plan
    for arm in plan.arms:
        of_arm = [row for row in rows if row["arm"] == arm.name]
        counts = [sum(row["status"] == s for row in of_arm) for s in present]
        final = [row for row in of_arm if row["stage"] == "report"]
        scores = [r[f"dev_{metric}"] for r in final if r[f"dev_{metric}"] is not None]
        trials = [trial for trial in plan.trials if trial.arm == arm.name]
        steps = sum(trial.config["train"]["num_steps"] for trial in trials)
        chosen = settings(json.loads(final[0]["nuisance"])) if final else "searching"
        table.add_row(
            arm.name,
            *(str(count or "") for count in counts),
            f"{sum(row['steps'] for row in of_arm)}/{steps}",
            f"{sum(scores) / len(scores):.4g}" if scores else "",
            *([chosen] if searches else []),
        )
    console = print_table(table)
    for error in dict.fromkeys(r["error"] for r in rows if r["error"]):
        arms = dict.fromkeys(r["arm"] for r in rows if r["error"] == error)
        console.print(f"failed: {', '.join(arms)}: {error}", soft_wrap=True)
    for row in rows:
        if row["status"] == "diverged":
            console.print(
                f"diverged: {row['arm']}, seed {row['seed']}, "
                f"{json.loads(row['nuisance']) or ''} at step {row['diverged_at']}"
            )
    done = [row for row in rows if row["status"] == "done" and row["stage"] == "report"]
    if done and not unfinished(plan, rows):
        console.print(
            f"All is done: python sweep.py report --workdir={sweep.workdir}",
            soft_wrap=True,
        )
