"""Output of `sweep.py list`: arms, groups, and the expected training time."""

import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from headcount.analysis.formatting import count
from headcount.analysis.report import margin_text
from headcount.analysis.sequential import detectable
from headcount.analysis.significance import POWER
from headcount.analysis.tables import print_table
from headcount.runtime.logging import clock, say
from headcount.runtime.workdir import num_cores
from headcount.sweeps.runner import train_command
from headcount.sweeps.store import Sweep, last_step
from headcount.sweeps.workers import local_workers, visible_gpus
from headcount.training.metrics import read_metrics

STEPS = 16  # training steps of the calibration
PATIENCE = 60.0  # seconds to wait for its evaluation


def print_list(sweep: Sweep, calibrate: bool) -> None:
    """Print the arms with their cost, the groups, and the expected time.

    Args:
        calibrate: whether to train a few steps to estimate the time.
    """
    searches = sweep.has_search
    table = Table(
        *("arm", "seeds", *(["search"] if searches else [])),
        *("parameters", "F", "multiply-adds per token", "baseline"),
        title=f"{count(len(sweep.plan.arms), 'arm')}, "
        f"{count(sweep.num_trials(), 'trial')}, "
        f"{count(len(sweep.groups), 'group')}{' at first' * sweep.grows}",
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
    data = sweep.settings["base"]["data"]
    if data["tokenizer"] != "bytes" and data["name"] != "recall":
        console.print(
            f"Parameters and multiply-adds assume a vocabulary of "
            f"data.vocab_size={data['vocab_size']} entries; the corpus may have fewer.",
            soft_wrap=True,
        )
    for index, group in enumerate(sweep.groups):
        arms = " and ".join(dict.fromkeys(trial.arm for trial in group.trials))
        console.print(f"group {index}: {arms}, {count(len(group.trials), 'trial')}")
    if sweep.looks:
        margin = "without a margin"
        if sweep.looks.margin is not None:
            margin = f"margin {margin_text(sweep.metric, sweep.looks.margin)}"
        looks = ", ".join(map(str, sweep.looks.seeds))
        console.print(f"Looks after {looks} seeds, {margin}.", soft_wrap=True)
    if searches and sweep.grows:
        console.print("More groups follow once dev has chosen the nuisance settings.")
    bound = "at most" if sweep.grows else "about"
    console.print(
        f"Training takes {bound} {total_flops(sweep):.3g} floating-point operations."
    )
    if sweep.looks:
        effect = detectable(sweep.looks)
        console.print(
            f"The plan finds a difference of {effect:.2g} standard deviations of "
            f"the paired differences with a power of {POWER:.0%}.",
            soft_wrap=True,
        )
    if len(sweep.groups) > 1 and num_cores() > 1 and not visible_gpus():
        console.print(
            "On CPUs, if the models are small, --resources=cores=1, a group on each "
            "core, is faster.",
            soft_wrap=True,
        )
    if calibrate:
        measured = measure(sweep)
        most = " at most" * sweep.grows
        console.print(
            f"Expected to take{most} {clock(expected_seconds(sweep, measured))} on one "
            f"device of this machine.\n{measured}",
            soft_wrap=True,
        )


class Measured(NamedTuple):
    """Times measured by a calibration on the first group, in seconds."""

    start: float  # until the first step is logged: imports, data, compilation
    step: float  # of all trials of the group
    evaluation: float  # on dev, including its compilation
    is_least: bool  # whether the evaluation timed out, so its time is a lower bound
    arm: str

    def __str__(self) -> str:
        least = "more than " * self.is_least
        return (
            f"This rests on a few steps of {self.arm}: {self.start:.0f} s to start and "
            f"compile, {self.step:.3g} s per step, {least}{self.evaluation:.0f} s per "
            f"evaluation. Other arms are scaled by their multiply-adds."
        )


def total_flops(sweep: Sweep) -> float:
    """Return the FLOPs of training all trials, searches included."""
    return sum(
        arm.training_flops * (len(arm.seeds) + sweep.search.max_trials(arm))
        for arm in sweep.plan.arms
    )


def expected_seconds(sweep: Sweep, measured: Measured) -> float:
    """Estimate how long the whole sweep takes, one group after another.

    Every group starts and compiles twice, to train and to score; it evaluates during
    training, and on two splits afterwards. Groups that a search or a look will add are
    assumed to be as large as the known ones.
    """
    group = sweep.groups[0]
    config, arm = group.trials[0].config, sweep.plan.arm(group.trials[0].arm)
    steps = config["train"]["num_steps"]
    evaluations = steps // config["train"]["eval_every_steps"] + 2
    training = steps * measured.step + evaluations * measured.evaluation
    num_known = sum(len(group.trials) for group in sweep.groups)
    groups = len(sweep.groups) * sweep.num_trials() / num_known
    share = total_flops(sweep) / (arm.training_flops * len(group.trials))
    return 2 * groups * measured.start + share * training


def measure(sweep: Sweep) -> Measured:
    """Train a few steps of the first group, with one evaluation.

    Raises:
        ValueError: the group can't be trained.
    """
    group = sweep.groups[0]
    say(f"Calibrating with a few steps of {group.trials[0].arm} ...")
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        command = train_command(sweep, group)
        at = next(i for i, part in enumerate(command) if part.startswith("--workdir="))
        command[at] = f"--workdir={folder}"
        steps = min(group.trials[0].config["train"]["num_steps"], STEPS)
        command += [
            f"--config.train.log_every_steps={max(1, steps // 4)}",
            f"--config.train.num_steps={steps}",
            f"--config.train.eval_every_steps={steps}",
            f"--config.train.checkpoint_every_steps={steps}",
            "--config.train.tracker=none",
        ]
        begin = time.monotonic()
        child = subprocess.Popen(
            command,
            env=os.environ | local_workers()[0].environment,
            stdout=subprocess.DEVNULL,
            stderr=output,  # not a pipe: a full one would stop the process
        )
        first = None  # first logged step, and the time at which it was seen
        try:
            while child.poll() is None:
                if first is None and (step := last_step(Path(folder))):
                    first = step, time.monotonic()
                if first is not None and time.monotonic() > first[1] + PATIENCE:
                    break
                time.sleep(0.05)
        finally:
            is_least = child.poll() is None
            child.kill()
            child.wait()
        end = time.monotonic()
        rates = [row.get("steps_per_second") for row in read_metrics(Path(folder))]
        first = first or (last_step(Path(folder)), end)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    rates = [rate for rate in rates if rate]  # evaluations and the first row have none
    if not rates:
        raise ValueError(
            f"The calibration failed: {lines[-1] if lines else 'no output'} "
            f"(--nocalibrate skips it)"
        )
    step_seconds = 1 / rates[-1]
    start = max(0.0, first[1] - begin - first[0] * step_seconds)
    evaluation = max(0.0, end - begin - start - steps * step_seconds)
    return Measured(start, step_seconds, evaluation, is_least, group.trials[0].arm)
