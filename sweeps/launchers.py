"""Where groups run: here, as tasks of a Ray cluster, or as a Slurm array.

Elsewhere a group is the call `sweep.py run --workdir=... --group=NAME`, on a file
system that all machines share; only the files in the workdir tell what has happened.
Ray and submitit are optional: requirements-sweeps.txt.
"""

import ast
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys

from headcount.configs.commandline import describe, one_sentence
from headcount.runtime import cluster
from headcount.runtime.logging import Progress, say
from headcount.sweeps.optional import package
from headcount.sweeps.plan import Group
from headcount.sweeps.runner import ROOT, Runner, Stopped, workers_here
from headcount.sweeps.store import Sweep

RETRIES = 3  # of a task whose worker was lost


def local(sweep: Sweep, groups: list[Group] | None, address, resources) -> list[dict]:
    """Run groups here, on every local device; returns the table's rows.

    `resources` may say how many `cores` a group takes, of a machine without GPUs.

    Raises:
        ValueError: a group can't have so many.
        Stopped: by a signal.
    """
    del address
    with one_sentence():
        workers = workers_here(**parsed(resources))
    return Runner(sweep, groups, workers).run()


def command_of(sweep: Sweep, group: Group) -> list[str]:
    """The call that runs one group, from the repository's root."""
    workdir = sweep.workdir.resolve()
    return [
        sys.executable,
        "sweep.py",
        "run",
        f"--workdir={workdir}",
        f"--group={group.name}",
        *cluster.arguments(),
    ]


def run_group(command: list[str], platform: str | None = None) -> int:
    """Run that call on the machine that this runs on; returns its exit status.

    Where this process is told to end, so is the call, which saves first.
    """
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = platform
    child = subprocess.Popen(command, cwd=ROOT)
    try:
        return child.wait()
    except BaseException:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise


def ray(sweep: Sweep, groups: list[Group] | None, address, resources) -> list[dict]:
    """Run groups as tasks of a Ray cluster; without an address, of one on this machine.

    A task takes a GPU where the cluster has any, else all the CPUs of a node, unless
    `resources` says otherwise (num_cpus, num_gpus, resources={"TPU": 4}). One whose
    worker is lost is started again, and resumes.

    Raises:
        ValueError: nothing answers at the address, or Ray knows no such resources.
    """
    with one_sentence():
        engine = package("ray")
        if address is not None:
            answers(address)
        engine.init(address=address, log_to_driver=False, logging_level="warning")
        needs = requirements(engine) | parsed(resources)
        with naming(resources, "Ray"):
            task = engine.remote(max_retries=RETRIES, **needs)(run_group)
    platform = None if needs.get("num_gpus") or "resources" in needs else "cpu"
    try:
        for wave in waves(sweep, groups):
            waiting = [task.remote(command_of(sweep, g), platform) for g in wave]
            say(f"{len(waiting)} groups as Ray tasks, each with {needs}.")
            progress = Progress(len(waiting), unit="group", seconds=30.0)
            while waiting:
                done, waiting = engine.wait(waiting, timeout=1.0)
                for reference in done:
                    lost_worker(engine, reference)
                progress.update(len(wave) - len(waiting))
            progress.close()
    except KeyboardInterrupt:
        raise Stopped("SIGINT") from None
    finally:
        engine.shutdown()
    return sweep.extended().collect()


def waves(sweep: Sweep, groups: list[Group] | None):
    """Yield the groups to run, then those that follow from a search, and so on."""
    wave = sweep.groups if groups is None else groups
    started: set[str] = set()
    while wave:
        yield wave
        started |= {group.name for group in wave}
        found = sweep.extended().groups if groups is None else []
        wave = [group for group in found if group.name not in started]


def lost_worker(engine, reference) -> None:
    """Tell of a task that Ray gave up; what its group has done is on disk."""
    try:
        engine.get(reference)
    except engine.exceptions.RayError as error:
        say(f"A Ray task ended early: {str(error).splitlines()[0]}")


def answers(address: str) -> None:
    """Raise a ValueError unless something listens at HOST:PORT."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"No Ray cluster answers at {address} ({error}); start one with `ray start "
            f"--head`, or leave --address out for one on this machine."
        ) from None


def requirements(engine) -> dict:
    """What a group takes of the cluster."""
    nodes = [node["Resources"] for node in engine.nodes() if node["Alive"]]
    if any("GPU" in node for node in nodes):
        return {"num_gpus": 1}
    chips = [int(node["TPU"]) for node in nodes if "TPU" in node]
    if chips:
        return {"resources": {"TPU": min(chips)}}
    return {"num_cpus": max(1, int(min(node.get("CPU", 1) for node in nodes)))}


class GroupJob:
    """A group as a job that submitit may stop at its time limit and send in again."""

    def __init__(self, command: list[str]):
        self.command = command

    def __call__(self) -> int:
        return run_group(self.command)

    def checkpoint(self):
        """What is to be run next: the same, which goes on from its checkpoint."""
        return package("submitit").helpers.DelayedSubmission(self)


def slurm(sweep: Sweep, groups: list[Group] | None, address, resources) -> list[dict]:
    """Run groups as a Slurm array through submitit; with the address `local`, here.

    `resources` are submitit's parameters: timeout_min, gpus_per_node, cpus_per_task,
    slurm_partition, slurm_array_parallelism, ...

    Raises:
        ValueError: there is no Slurm here, or submitit knows no such resources.
    """
    with one_sentence():
        submitit = package("submitit")
        if address not in (None, "local"):
            raise ValueError(
                f"--address={address} is Ray's; with --launcher=slurm it is `local` "
                f"(to try it out) or left out."
            )
        if address is None and shutil.which("sbatch") is None:
            raise ValueError(
                "--launcher=slurm needs Slurm's sbatch, which is not here; run it on a "
                "login node."
            )
        sweep = sweep._replace(workdir=sweep.workdir.resolve())
        executor = submitit.AutoExecutor(
            sweep.workdir / "slurm", cluster=address or "slurm"
        )
        with naming(resources, "submitit"):
            executor.update_parameters(name="headcount", **parsed(resources))
        os.chdir(ROOT)  # where a job finds this module
    for wave in waves(sweep, groups):
        with executor.batch():  # an array
            jobs = [executor.submit(GroupJob(command_of(sweep, g))) for g in wave]
        say(f"{len(jobs)} groups as jobs {jobs[0].job_id} to {jobs[-1].job_id}.")
        progress = Progress(len(jobs), unit="group", seconds=30.0)
        for done, job in enumerate(jobs, start=1):
            job.wait()
            if job.exception() is not None:
                say(f"Job {job.job_id} ended early: {job.exception()}".splitlines()[0])
            progress.update(done)
        progress.close()
    return sweep.extended().collect()


def parsed(resources: list[str]) -> dict:
    """KEY=VALUE pairs, the values as Python has them, else strings.

    Raises:
        ValueError: a pair has no "=".
    """
    found = {}
    for pair in resources:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--resources takes KEY=VALUE, got {pair!r}.")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found[key] = value
    return found


@contextlib.contextmanager
def naming(resources: list[str], whose: str):
    """Put --resources before what a launcher's package says of them."""
    try:
        yield
    except (ValueError, TypeError, NameError, AssertionError) as error:
        if not resources:
            raise
        raise ValueError(
            f"{' '.join(f'--resources={pair}' for pair in resources)}: {whose} does "
            f"not take that: {describe(error) or type(error).__name__}"
        ) from None


LAUNCHERS = {"local": local, "ray": ray, "slurm": slurm}
