"""What `sweep.py list` prints: arms, groups, and how long training would take."""

import subprocess
import tempfile
import time
from pathlib import Path

from rich.table import Table

from headcount.analysis.tables import print_table
from headcount.runtime.logging import clock, say
from headcount.sweeps.runner import train_command
from headcount.sweeps.store import Sweep, last_step
from headcount.training.metrics import read_metrics


def print_list(sweep: Sweep, calibrate: bool) -> None:
    """Print the arms with their cost, the groups, and the expected time.

    Args:
        calibrate: whether to train a few steps for the expected time.
    """
    searches = sweep.has_search
    table = Table(
        *("arm", "seeds", *(["search"] if searches else [])),
        *("parameters", "F", "multiply-adds per token", "baseline"),
        title=f"{len(sweep.plan.arms)} arms, {sweep.num_trials()} trials, "
        f"{len(sweep.groups)} groups{' at first' * searches}",
    )
    for arm in sweep.plan.arms:
        table.add_row(
            *(arm.name, str(len(arm.seeds))),
            *([str(sweep.search.max_trials(arm))] if searches else []),
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
    console.print(
        f"Training takes about {total_flops(sweep):.3g} floating-point operations."
    )
    if calibrate:
        seconds = expected_seconds(sweep)
        console.print(
            f"Expected to take {clock(seconds)} on this machine, without evaluation."
        )


def total_flops(sweep: Sweep) -> float:
    """Return the floating-point operations of all trainings, searches included."""
    return sum(
        arm.training_flops * (len(arm.seeds) + sweep.search.max_trials(arm))
        for arm in sweep.plan.arms
    )


def expected_seconds(sweep: Sweep) -> float:
    """Estimate how long training takes, from a few steps of the first group.

    Raises:
        ValueError: the group can't be trained.
    """
    group = sweep.groups[0]
    say(f"Calibrating with a few steps of {group.trials[0].arm} ...")
    with tempfile.TemporaryDirectory() as folder:
        command = train_command(sweep, group)
        at = next(i for i, part in enumerate(command) if part.startswith("--workdir="))
        command[at] = f"--workdir={folder}"
        steps = group.trials[0].config["train"]["num_steps"]
        command.append("--config.train.log_every_steps=4")
        # few steps, so that it ends soon even if this process is killed
        command.append(f"--config.train.num_steps={min(steps, 64)}")
        child = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            while child.poll() is None and last_step(Path(folder)) < 12:
                time.sleep(0.1)
        finally:
            child.kill()
            output = child.communicate()[1].strip().splitlines()
        rates = [row.get("steps_per_second") for row in read_metrics(Path(folder))]
    rates = [rate for rate in rates if rate]  # evaluations and the first row have none
    if not rates:
        raise ValueError(
            f"The calibration failed: {output[-1] if output else 'no output'} "
            f"(--nocalibrate skips it)"
        )
    arm = sweep.plan.arm(group.trials[0].arm)
    group_flops = arm.training_flops * len(group.trials)
    return steps / rates[-1] / group_flops * total_flops(sweep)
