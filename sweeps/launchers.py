"""Run groups on this machine, as tasks of a Ray cluster, or as a Slurm array.

Other machines run a group with `sweep.py run --workdir=... --group=NAME`, on a file
system that all machines share. Ray and submitit are optional; see
requirements-sweeps.txt.

A launcher checks its flags, before a sweep is started in the workdir; then it returns a
function of a sweep and its groups (or a shard), which runs them.
"""

import ast
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from headcount.configs.commandline import describe
from headcount.runtime import cluster
from headcount.runtime.logging import Progress, say
from headcount.sweeps.plan import Group, Shard
from headcount.sweeps.runner import ROOT, Runner, Stopped, task_flags
from headcount.sweeps.search import optional_package
from headcount.sweeps.store import Sweep
from headcount.sweeps.workers import local_workers

RETRIES = 3  # per Ray task, if its worker is lost


def local(workdir: Path, address, resources: list[str]) -> Callable:
    """Run groups on the devices of this machine.

    On a machine without GPUs, `resources` may set the number of `cores` per group.

    Raises:
        ValueError: the machine has fewer cores.
    """
    del workdir, address
    workers = local_workers(**parse_resources(resources))
    return lambda sweep, groups: Runner(sweep, groups, workers).run()


def group_call(sweep: Sweep, group: Group) -> list[str]:
    """Return the command that runs one group, valid in any directory and machine."""
    return [
        sys.executable,
        str(ROOT / "sweep.py"),
        "run",
        *task_flags(sweep),
        f"--workdir={sweep.workdir.resolve()}",
        f"--group={group.name}",
        *cluster.arguments(),
    ]


def run_call(command: list[str], folder: str, platform: str | None = None) -> int:
    """Run a command on the machine of a worker; return its exit code.

    If this process is interrupted, forward SIGTERM to the command, and wait for it to
    save its state.

    Args:
        command: the result of `group_call`.
        folder: folder to run it in, from which the config's relative paths count.
        platform: JAX_PLATFORMS of the command.
    """
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform
    child = subprocess.Popen(command, cwd=folder)
    try:
        return child.wait()
    except BaseException:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


def on_ray(workdir: Path, address: str | None, resources: list[str]) -> Callable:
    """Run groups as tasks of a Ray cluster; without an address, start a cluster here.

    By default, a task takes a GPU if the cluster has any, else a host's TPU chips, else
    all CPUs of a node; `resources` overrides this (num_cpus, num_gpus,
    resources={"TPU": 4}). A task whose worker is lost is restarted, and resumes.

    Raises:
        ValueError: nothing answers at the address, or Ray rejects `resources`.
    """
    del workdir
    ray = optional_package("ray")
    if address is not None:
        check_address(address)
    ray.init(address=address, log_to_driver=False, logging_level="warning")
    needs = default_needs(ray) | parse_resources(resources)
    with name_resources_in_errors(resources, "Ray"):
        task = ray.remote(max_retries=RETRIES, **needs)(run_call)
    return partial(run_on_ray, ray, task, needs)


def run_on_ray(
    ray, task, needs: dict, sweep: Sweep, groups: list[Group] | Shard
) -> None:
    """Run groups as Ray tasks with these needs.

    Raises:
        Stopped: Ctrl-C was pressed.
    """
    platform = None if needs.get("num_gpus") or "resources" in needs else "cpu"
    try:
        for wave in waves(sweep, groups):
            names = {
                task.remote(group_call(sweep, group), os.getcwd(), platform): group.name
                for group in wave
            }
            waiting = list(names)
            say(f"{len(waiting)} groups as Ray tasks, each with {needs}.")
            progress = Progress(len(waiting), unit="group", seconds=30.0)
            while waiting:
                done, waiting = ray.wait(waiting, timeout=1.0)
                for reference in done:
                    log_end(names[reference], partial(ray.get, reference))
                progress.update(len(wave) - len(waiting))
            progress.close()
    except KeyboardInterrupt:
        raise Stopped("SIGINT", signal.SIGINT) from None
    finally:
        ray.shutdown()


def waves(sweep: Sweep, groups: list[Group] | Shard) -> Iterator[list[Group]]:
    """Yield the groups to run, then the groups that their results add, and so on."""
    is_shard = isinstance(groups, Shard)
    wave = sweep.shard(*groups) if is_shard else groups
    started: set[str] = set()
    while wave:
        yield wave
        started |= {group.name for group in wave}
        extended = sweep.extended().shard(*groups) if is_shard else []
        wave = [group for group in extended if group.name not in started]


def log_end(group: str, result: Callable[[], int]) -> None:
    """Log a group whose task was lost or failed; its progress is on disk.

    Args:
        group: the group's name.
        result: returns the result of `run_call`, or raises the launcher's error.
    """
    try:
        code = result()
    except Exception as error:  # whatever Ray or submitit raises
        reason = str(error).split("\n")[0] or type(error).__name__
        say(f"The task of {group} ended early: {reason}")
    else:
        if code:
            say(f"The task of {group} ended with exit code {code}.")


def check_address(address: str) -> None:
    """Raise a ValueError unless something listens at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--address={address}: no Ray cluster answers there ({error}); start one "
            f"with `ray start --head`, or leave --address out to start one here."
        ) from None


def default_needs(ray) -> dict:
    """Return a task's default needs: a GPU, a host's TPU chips, or a node's CPUs."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any("GPU" in node for node in nodes):
        return {"num_gpus": 1}
    chips = [int(node["TPU"]) for node in nodes if "TPU" in node]
    if chips:
        return {"resources": {"TPU": min(chips)}}
    cores = [int(node["CPU"]) for node in nodes if "CPU" in node]  # not of all heads
    return {"num_cpus": max(1, min(cores, default=1))}


class SlurmJob:
    """A group as a job that submitit may stop at its time limit and resubmit."""

    def __init__(self, command: list[str]):
        self.command, self.folder = command, os.getcwd()

    def __call__(self) -> int:
        return run_call(self.command, self.folder)

    def checkpoint(self):
        """Return the job to resubmit: the same command, which resumes."""
        return optional_package("submitit").helpers.DelayedSubmission(self)


def on_slurm(workdir: Path, address: str | None, resources: list[str]) -> Callable:
    """Run groups as a Slurm array through submitit; address `local` runs them here.

    `resources` are submitit's parameters: timeout_min, gpus_per_node, cpus_per_task,
    slurm_partition, slurm_array_parallelism, ...

    Raises:
        ValueError: Slurm is not available, or submitit rejects `resources`.
    """
    submitit = optional_package("submitit")
    if address not in (None, "local"):
        raise ValueError(
            f"--address={address} is for Ray; with --launcher=slurm it is `local` "
            f"(to try it without Slurm) or left out."
        )
    if address is None and shutil.which("sbatch") is None:
        raise ValueError(
            "--launcher=slurm: sbatch was not found; run it on a login node of Slurm."
        )
    folder = workdir.resolve() / "slurm"
    executor = submitit.AutoExecutor(folder, cluster=address or "slurm")
    with name_resources_in_errors(resources, "submitit"):
        executor.update_parameters(name="headcount", **parse_resources(resources))
    return partial(run_on_slurm, executor)


def run_on_slurm(executor, sweep: Sweep, groups: list[Group] | Shard) -> None:
    """Run groups as Slurm arrays of a submitit executor."""
    for wave in waves(sweep, groups):
        with executor.batch():  # as one array
            jobs = [executor.submit(SlurmJob(group_call(sweep, g))) for g in wave]
        say(f"{len(jobs)} groups as jobs {jobs[0].job_id} to {jobs[-1].job_id}.")
        progress = Progress(len(jobs), unit="group", seconds=30.0)
        for done, (group, job) in enumerate(zip(wave, jobs, strict=True), start=1):
            log_end(group.name, job.result)
            progress.update(done)
        progress.close()


def parse_resources(resources: list[str]) -> dict:
    """Parse KEY=VALUE pairs; values that are not Python literals are strings.

    Raises:
        ValueError: a pair has no "=".
    """
    parsed = {}
    for pair in resources:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--resources must be KEY=VALUE, got {pair!r}.")
        try:
            parsed[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            parsed[key] = value
    return parsed


@contextlib.contextmanager
def name_resources_in_errors(resources: list[str], package: str) -> Iterator[None]:
    """Prefix errors of a launcher's package with --resources."""
    try:
        yield
    except (ValueError, TypeError, NameError, AssertionError) as error:
        if not resources:
            raise
        flags = " ".join(f"--resources={pair}" for pair in resources)
        reason = describe(error) or type(error).__name__
        raise ValueError(f"{flags}: {package} does not accept it: {reason}") from None


LAUNCHERS = {"local": local, "ray": on_ray, "slurm": on_slurm}
