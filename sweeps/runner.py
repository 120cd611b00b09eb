"""Runs groups: train.py, then eval.py on dev and test, each a process.

Whatever stops it, the same call goes on: what a group has finished lies in its folder,
and its claim is a lock that ends with the processes that hold it. train.py inherits
the lock, so one that outlives a killed sweep is waited for, not run twice.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from headcount.runtime.logging import Progress, say
from headcount.runtime.workdir import commit, write_json
from headcount.sweeps.plan import Group, differences
from headcount.sweeps.records import DECODING, read_json
from headcount.sweeps.store import TRAINED, Sweep, last_step, locked

ROOT = Path(__file__).resolve().parent.parent
WAIT = 0.5  # seconds between looks at processes and at groups that others work on


class Stopped(Exception):
    """The sweep was asked to stop."""


class Failed(Exception):
    """A process of a group failed; the message is its last line."""


def train_command(sweep: Sweep, group: Group) -> list[str]:
    """The line that trains a group, by itself and from anywhere in the repository."""
    settings, folder = sweep.settings, sweep.folder(group)
    of_program, numbers = differences(group.trials, settings["base"])
    # not the file that it was read from, which may be edited before all have begun
    base = folder / "base" / "config.json"
    base.parent.mkdir(exist_ok=True)
    files = {folder / "differences.json": numbers, base: settings["base"]}
    for path, value in files.items():
        with contextlib.suppress(ValueError):  # a damaged one is written anew
            if read_json(path) == value:
                continue
        write_json(path, value)
    overrides = settings["overrides"] | of_program
    return [
        *script("train.py"),
        f"--config={os.path.relpath(ROOT / 'configs/run.py')}:{base.parent}",
        *(f"--config.{key}={value}" for key, value in overrides.items()),
        f"--workdir={folder}",
        f"--trials={folder / 'differences.json'}",
    ]


def eval_command(sweep: Sweep, group: Group, splits: list[str]) -> list[str]:
    """The line that scores a group on splits."""
    folder = sweep.folder(group)
    return [
        *script("eval.py"),
        f"--workdir={folder}",
        f"--split={','.join(splits)}",
        f"--checkpoint={sweep.settings['checkpoint']}",
        *(f"--{name}={value}" for name, value in DECODING.items()),
        f"--output={folder / 'SPLIT.txt'}",
    ]


def script(name: str) -> list[str]:
    """How to call a script of ours."""
    return [sys.executable, os.path.relpath(ROOT / name)]


class Runner:
    """Works through groups, each of the workers through one at a time.

    `groups` None: through all of the sweep, and those that follow from a search.
    """

    def __init__(
        self,
        sweep: Sweep,
        groups: list[Group] | None,
        workers: list["Worker"] | None = None,
    ):
        self.sweep = sweep
        failed = (sweep.workdir / "groups").glob("*/failed.json")
        self.failed = {path: noted(path) for path in failed}  # of earlier runs
        self.workers = workers_here() if workers is None else workers
        self.grows = groups is None and sweep.searches()
        self.left = list(sweep.groups if groups is None else groups)
        self.mine = list(self.left)
        self.stop: str | None = None
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    def run(self) -> list[dict]:
        """Run until nothing is left to do here; returns the table's rows.

        Raises:
            Stopped: a signal came; what runs was saved first.
        """
        before = {
            number: signal.signal(number, self.receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        now, rows = commit(), self.sweep.collect()
        others = {row.get("commit") for row in rows} - {None, now}
        if others and self.left and now:
            say(
                f"The code has changed: from now on trials are of {now}, those so "
                f"far of {', '.join(sorted(others))}. What differs may be of that."
            )
        threads = [
            threading.Thread(target=self.work, args=(worker,))
            for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        try:
            self.watch(threads)
        except BaseException as error:  # as where nobody reads any more what is said
            self.errors.append(error)
            self.stop = self.stop or "an error"
            for thread in threads:
                thread.join()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.errors:
            raise self.errors[0]
        rows = self.sweep.collect()
        if self.stop is None and self.left:
            self.stop = "A training process was told to stop"
        if self.stop is not None:
            raise Stopped(self.stop)
        return rows

    def receive(self, number, frame):
        """Note a signal; the processes are told by those that wait for them."""
        self.stop = signal.Signals(number).name

    def watch(self, threads) -> None:
        """Show the progress of the whole sweep until the threads end."""
        total = sum(len(group.trials) for group in self.mine)
        if self.grows:
            total = self.sweep.num_trials()

        def done():
            """Trials done, by all processes that share the sweep, in parts too."""
            return sum(len(group.trials) * self.share(group) for group in self.mine)

        progress = Progress(total, done(), unit="trial", seconds=30.0)
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(WAIT / len(threads))
            finished = len(self.mine) - len(self.left)
            text = f"{finished} of {len(self.mine)} groups"
            progress.update(round(min(done(), total - 0.1), 1), text)
        progress.close()

    def share(self, group: Group) -> float:
        """How much of a group's work is done, roughly: four fifths are training."""
        if group not in self.left:
            return 1.0
        folder = self.sweep.folder(group)
        steps = group.trials[0].config["train"]["num_steps"]
        trained = (folder / TRAINED).exists()
        return 0.8 * (1.0 if trained else last_step(folder) / steps)

    def work(self, worker: "Worker") -> None:
        """Take a group that nobody has, do what can be done, and so on."""
        try:
            if worker.cores is not None:  # of this thread, and of what it starts
                os.sched_setaffinity(0, worker.cores)
            while self.grow() and self.stop is None:
                if not any(self.take(g, worker.environment) for g in list(self.left)):
                    time.sleep(WAIT)
        except Stopped:
            pass
        except BaseException as error:
            self.errors.append(error)
            self.stop = self.stop or "an error"

    def take(self, group: Group, environment: dict) -> bool:
        """Advance a group unless another process or worker has it; whether it did."""
        if self.stop is not None:
            raise Stopped
        folder = self.sweep.folder(group)
        with locked(folder / ".claim", wait=False) as claim:
            if claim is None or group not in self.left:
                return False
            try:
                moved = self.advance(group, claim, environment)
            except Failed as error:
                self.fail(group, str(error))
                moved = True
            with self.lock:
                self.left.remove(group)
            if moved:
                self.sweep.collect()
            return True

    def grow(self) -> bool:
        """Take up the groups that follow from what is done; whether any is left."""
        with self.lock:
            if self.grows:
                self.sweep = self.sweep.extended()
                names = {group.name for group in self.mine}
                new = [g for g in self.sweep.groups if g.name not in names]
                self.mine += new
                self.left += new
            return bool(self.left)

    def advance(self, group: Group, claim, environment) -> bool:
        """Do what a group still needs; whether anything was."""
        folder = self.sweep.folder(group)
        failed = folder / "failed.json"
        if failed.exists():
            if noted(failed) != self.failed.get(failed):  # another process's, just now
                return False
            failed.unlink()  # of an earlier run: try again
        moved = False
        if not (folder / TRAINED).exists():
            self.process(train_command(self.sweep, group), group, claim, environment)
            (folder / TRAINED).touch()
            moved = True
        splits = [
            split
            for split in self.sweep.splits(group)
            if not (folder / f"result-{split}.json").exists()
        ]
        if splits:
            command = eval_command(self.sweep, group, splits)
            self.process(command, group, claim, environment)
        return moved or bool(splits)

    def process(self, command: list[str], group: Group, claim, environment) -> None:
        """Run a process to its end; its words go to the group's log.txt.

        Raises:
            Failed: it did.
            Stopped: the sweep was to stop; the process was told and waited for.
        """
        folder = self.sweep.folder(group)
        what = f"{group.trials[0].arm}, {len(group.trials)} trials"
        say(f"{what}: {shlex.join(['python', *command[1:]])}")
        log = folder / "log.txt"
        with log.open("a") as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            begin = file.tell()
            child = self.start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                pass_fds=(claim.fileno(),),
            )
        while child.poll() is None:
            if self.stop is not None:
                child.terminate()
                child.wait()
                raise Stopped
            time.sleep(WAIT / 5)
        if self.stop is not None:  # before it is blamed: a signal may reach both
            raise Stopped
        said = log.read_bytes()[begin:].decode(errors="replace").strip()
        if child.returncode:
            raise Failed((said or f"exit code {child.returncode}").splitlines()[-1])
        if "the same command goes on from there" in said:
            raise Stopped

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Start a process of a group."""
        return subprocess.Popen(command, **options)

    def fail(self, group: Group, error: str) -> None:
        """Report a group, and leave it."""
        write_json(self.sweep.folder(group) / "failed.json", {"error": error})
        log = self.sweep.folder(group) / "log.txt"
        say(f"{group.trials[0].arm} failed, the others go on: {error} (see {log})")


def noted(failed: Path) -> int | None:
    """When a failure was written down, by the file's own clock; None: it is gone."""
    try:
        return failed.stat().st_mtime_ns
    except FileNotFoundError:
        return None


class Worker(NamedTuple):
    """Where the processes of a group run."""

    environment: dict  # of theirs, besides ours
    cores: set[int] | None = None  # None: all


def workers_here(cores: int | None = None) -> list[Worker]:
    """One a GPU, else one for all that there is, or one for so many cores.

    Raises:
        ValueError: there are not so many cores, or a worker has a GPU.
    """
    found = [Worker(environment) for environment in devices()]
    if cores is None:
        return found
    if any(worker.environment for worker in found):
        raise ValueError(
            "--resources=cores is for machines without GPUs; with JAX_PLATFORMS=cpu a "
            "sweep leaves them alone."
        )
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError("--resources=cores needs Linux, which gives a process cores.")
    there = sorted(os.sched_getaffinity(0))
    if not isinstance(cores, int) or not 1 <= cores <= len(there):
        raise ValueError(
            f"--resources=cores must be from 1 to {len(there)}, the cores that there "
            f"are, got {cores}."
        )
    starts = range(0, len(there) - cores + 1, cores)
    return [Worker({}, set(there[start : start + cores])) for start in starts]


def devices() -> list[dict]:
    """The environment of each worker: one a GPU, else one for all that there is."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        try:
            told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        except FileNotFoundError:
            return [{}]
        lines = [line for line in told.stdout.splitlines() if line.startswith("GPU")]
        names = [str(index) for index in range(len(lines))]
    else:
        names = [name for name in visible.split(",") if name]
    return [{"CUDA_VISIBLE_DEVICES": name} for name in names] or [{}]
