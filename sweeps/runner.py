"""Run groups: train.py, then eval.py on dev and test, each in its own process.

All progress of a group is in its folder, so rerunning the same command resumes a sweep
after any interruption. A group is claimed by a file lock that train.py and eval.py
inherit: if they outlive a killed sweep, the next sweep waits for them instead of
starting a second process.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from headcount.analysis.formatting import count
from headcount.runtime.files import locked, open_append
from headcount.runtime.logging import Progress, say
from headcount.runtime.workdir import commit, write_json
from headcount.sweeps.plan import Group, Shard, program_and_trials
from headcount.sweeps.store import (
    TRAINED,
    Sweep,
    last_step,
    read_optional_json,
    read_run,
)
from headcount.sweeps.table import collect
from headcount.sweeps.workers import Worker, local_workers

ROOT = Path(__file__).resolve().parent.parent
POLL = 0.5  # seconds between polls of processes, and of groups claimed by others
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Exit codes of a process ended by one of them: 128 + n after saving, -n at once.
STOPPED = {128 + number: number for number in SIGNALS}
STOPPED |= {-number: number for number in SIGNALS}


class Stopped(Exception):
    """A signal stopped the sweep, or one of its processes.

    Args:
        reason: description of what happened.
        number: the signal; None if this process did not receive one.
    """

    def __init__(self, reason: str, number: int | None = None):
        super().__init__(reason)
        self.number = number


class Failed(Exception):
    """A process of a group failed; the message has the last line of its output."""


def group_command(sweep: Sweep, group: Group, splits: list[str] | None) -> list[str]:
    """Return the command that scores a group on splits, or trains it if None."""
    if splits is None:
        return train_command(sweep, group)
    return eval_command(sweep, group, splits)


def train_command(sweep: Sweep, group: Group) -> list[str]:
    """Return the command that trains a group; write its config to the group's folder.

    This is the config with which the sweep was started. The original config file may
    have been edited since.
    """
    settings, folder = sweep.settings, sweep.folder(group)
    program, trials = program_and_trials(group.trials, settings["base"])
    base = folder / "base" / "config.json"
    base.parent.mkdir(exist_ok=True)
    files = {folder / "trial_settings.json": trials, base: settings["base"]}
    for path, value in files.items():
        with contextlib.suppress(ValueError):  # replace a damaged file
            if read_optional_json(path) == value:
                continue
        write_json(path, value)
    return [
        *script("train.py"),
        f"--config={os.path.relpath(ROOT / 'configs/run.py')}:{base.parent}",
        *(f"--config.{key}={value}" for key, value in program.items()),
        *task_flags(sweep),
        f"--workdir={folder}",
        f"--trials={folder / 'trial_settings.json'}",
    ]


def eval_command(sweep: Sweep, group: Group, splits: list[str]) -> list[str]:
    """Return the command that scores a group on splits with the task's defaults."""
    folder, directory = sweep.folder(group), sweep.settings["base"]["data"]["directory"]
    output = f"--output={folder / 'SPLIT.txt'}"
    return [
        *script("eval.py"),
        *task_flags(sweep),
        *([] if directory is None else [f"--directory={directory}"]),
        f"--workdir={folder}",
        f"--split={','.join(splits)}",
        f"--checkpoint={sweep.settings['checkpoint']}",
        *[output] * sweep.task.has_predictions,
    ]


def script(name: str) -> list[str]:
    """Return the command that starts one of our scripts."""
    return [sys.executable, os.path.relpath(ROOT / name)]


def task_flags(sweep: Sweep) -> list[str]:
    """Return the flag that registers a user-defined task, if the sweep has one."""
    return [] if sweep.task_file is None else [f"--task_file={sweep.task_file}"]


def next_command(sweep: Sweep, verb: str) -> str:
    """Return the command by which the user executes a verb of sweep.py on a sweep."""
    words = ["python", "sweep.py", verb, *task_flags(sweep)]
    return shlex.join([*words, f"--workdir={sweep.workdir}"])


class Runner:
    """Runs groups of a sweep; each worker runs one group at a time.

    Args:
        sweep: the sweep.
        groups: groups to run; a shard includes groups that a search or a look adds
            later.
        workers: default: the workers of this machine.
        arguments: flags to add to every command.
        announce: function that is called with a group's name and splits before their
            process starts.
    """

    def __init__(
        self,
        sweep: Sweep,
        groups: list[Group] | Shard,
        workers: list[Worker] | None = None,
        arguments: Sequence[str] = (),
        announce: Callable = lambda name, splits: None,
    ):
        self.sweep, self.arguments, self.announce = sweep, arguments, announce
        failed = (sweep.workdir / "groups").glob("*/failed.json")
        self.old_failures = {path: modified_at(path) for path in failed}
        self.workers = local_workers() if workers is None else workers
        self.shard = groups if isinstance(groups, Shard) else None
        self.extends = self.shard is not None and sweep.grows
        self.left = sweep.shard(*groups) if self.shard else list(groups)
        self.groups = list(self.left)
        self.signal: int | None = None  # signal received by this process
        self.child_signal: int | None = None  # signal received only by a child process
        self.is_stopping = False
        self.errors: list[BaseException] = []
        self.lock = threading.Lock()

    def run(self) -> None:
        """Run until no group is left.

        Raises:
            Stopped: a signal was received, and the processes have saved their state.
        """
        handlers = {
            number: signal.signal(number, self.receive)
            for number in SIGNALS
            # keep ignored signals ignored: nohup ignores SIGHUP
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self.warn_of_changed_code(collect(self.sweep))
        threads = [
            threading.Thread(target=self.work, args=(worker,))
            for worker in self.workers
        ]
        for thread in threads:
            thread.start()
        try:
            self.show_progress(threads)
        except BaseException as error:  # for example, a broken output pipe
            self.errors.append(error)
            self.is_stopping = True
            for thread in threads:
                thread.join()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self.errors:
            raise self.errors[0]
        collect(self.sweep)
        if self.signal is not None:
            raise Stopped(signal.Signals(self.signal).name, self.signal)
        if self.child_signal is not None:
            name = signal.Signals(self.child_signal).name
            raise Stopped(f"{name} in one of its processes")

    def receive(self, number, frame) -> None:
        """Record the first signal, which the workers forward to their processes."""
        self.signal = self.signal or number
        self.is_stopping = True

    def warn_of_changed_code(self, rows: list[dict]) -> None:
        """Log a warning if existing trials were run at another commit."""
        current = commit()
        other_commits = {row["commit"] for row in rows} - {None, current}
        if other_commits and self.left and current:
            say(
                f"The code has changed: new trials are of {current}, those so far of "
                f"{', '.join(sorted(other_commits))}. Differences may come from that."
            )

    def show_progress(self, threads) -> None:
        """Show the progress of the sweep until the threads end."""
        total = sum(len(group.trials) for group in self.groups)
        if self.extends:
            total = -(-self.sweep.num_trials() // self.shard.count)

        def done():
            """Count finished trials of all processes, including fractions of groups."""
            return sum(len(g.trials) * self.fraction_done(g) for g in self.groups)

        progress = Progress(total, done(), unit="trial", seconds=30.0)
        while any(thread.is_alive() for thread in threads):
            for thread in threads:
                thread.join(POLL / len(threads))
            finished = len(self.groups) - len(self.left)
            text = f"{finished} of {len(self.groups)} groups"
            progress.update(round(min(done(), total - 0.1), 1), text)
        progress.close()

    def fraction_done(self, group: Group) -> float:
        """Estimate the finished fraction of a group; training counts as four fifths."""
        folder = self.sweep.folder(group)
        if group not in self.left or not self.unscored(group):
            return 1.0
        steps = group.trials[0].config["train"]["num_steps"]
        return 0.8 * (1.0 if is_trained(folder) else last_step(folder) / steps)

    def work(self, worker: Worker) -> None:
        """Run groups that no other process has claimed, until none is left."""
        try:
            if worker.cores is not None:  # for this thread and its child processes
                os.sched_setaffinity(0, worker.cores)
            while self.has_groups() and not self.is_stopping:
                if not any(self.take(g, worker.environment) for g in list(self.left)):
                    time.sleep(POLL)
        except Stopped:
            self.is_stopping = True
        except BaseException as error:
            self.errors.append(error)
            self.is_stopping = True

    def has_groups(self) -> bool:
        """Return whether groups are left, or running groups may still add some.

        Groups of other shards may complete a look, which then adds groups to this
        shard. Wait only for groups that some process is working on.
        """
        with self.lock:
            if not self.extends:
                return bool(self.left)
            self.sweep = self.sweep.extended()
            names = {group.name for group in self.groups}
            added = [g for g in self.sweep.shard(*self.shard) if g.name not in names]
            self.groups += added
            self.left += added
            if self.left or self.shard.count == 1:
                return bool(self.left)
            names |= {group.name for group in added}
            foreign = [group for group in self.sweep.groups if group.name not in names]
            return any(map(self.is_claimed, foreign))

    def is_claimed(self, group: Group) -> bool:
        """Return whether another process works on a group."""
        with locked(self.sweep.folder(group) / ".claim", wait=False) as claim:
            return claim is None

    def take(self, group: Group, environment: dict) -> bool:
        """Run what a group still needs; return False if another process claims it."""
        if self.is_stopping:
            raise Stopped("the sweep is stopping")
        folder = self.sweep.folder(group)
        with locked(folder / ".claim", wait=False) as claim:
            if claim is None or group not in self.left:
                return False
            try:
                changed = self.advance(group, claim, environment)
            except Failed as error:
                self.report_failure(group, str(error))
                changed = True
            with self.lock:
                self.left.remove(group)
            if changed:
                collect(self.sweep)
            return True

    def advance(self, group: Group, claim, environment: dict) -> bool:
        """Train and score a group if needed; return whether anything was done."""
        folder = self.sweep.folder(group)
        failed = folder / "failed.json"
        if failed.exists():
            if modified_at(failed) != self.old_failures.get(failed):
                return False  # another process has just written it
            failed.unlink()  # from an earlier call: try again
        changed = False
        if not is_trained(folder):
            try:
                self.run_process(group, None, claim, environment)
            except Failed:
                if not is_trained(folder):  # otherwise all trials diverged
                    raise
            changed = True
        if read_run(folder)["status"] == "diverged":  # nothing to score
            return changed
        missing = self.unscored(group)
        if missing:
            self.run_process(group, missing, claim, environment)
        return changed or bool(missing)

    def unscored(self, group: Group) -> list[str]:
        """Return the splits on which a group has no scores yet."""
        folder, splits = self.sweep.folder(group), self.sweep.splits(group)
        return [x for x in splits if not (folder / f"result-{x}.json").exists()]

    def run_process(
        self, group: Group, splits: list[str] | None, claim, environment: dict
    ) -> None:
        """Run a process until it ends; append its output to the group's log.txt.

        A signal that this process receives is forwarded once. The child may already
        have received it as a member of the process group; train.py ignores duplicates.

        Args:
            splits: splits to score on; None trains.

        Raises:
            Failed: the exit code is not 0.
            Stopped: a signal stopped the sweep or the process.
        """
        command = self.command(group, splits)
        name = f"{group.trials[0].arm}, {count(len(group.trials), 'trial')}"
        say(f"{name}: {shlex.join(['python', *command[1:]])}")
        log = self.sweep.folder(group) / "log.txt"
        with open_append(log) as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            start = file.tell()
            child = self.start(
                group,
                splits,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | environment,
                pass_fds=(claim.fileno(),),
            )
        while child.poll() is None:
            if self.is_stopping:
                child.send_signal(self.signal or signal.SIGTERM)
                child.wait()
            time.sleep(POLL / 5)
        if child.returncode in STOPPED and not self.is_stopping:
            self.child_signal = STOPPED[child.returncode]
            raise Stopped("a process was stopped")
        if self.is_stopping:  # not a failure: the child may have got the signal, too
            raise Stopped("the sweep is stopping")
        if child.returncode:
            output = log.read_bytes()[start:].decode(errors="replace").strip()
            reason = output.splitlines()[-1:]
            if child.returncode < 0 or not reason:  # a killed process gives no reason
                reason.insert(0, f"exit code {child.returncode}")
            raise Failed("; ".join(reason))

    def command(self, group: Group, splits: list[str] | None) -> list[str]:
        """Return the command of a process of a group."""
        return [*group_command(self.sweep, group, splits), *self.arguments]

    def start(
        self, group: Group, splits: list[str] | None, **options
    ) -> subprocess.Popen:
        """Start a process of a group."""
        self.announce(group.name, splits)
        return subprocess.Popen(self.command(group, splits), **options)

    def report_failure(self, group: Group, error: str) -> None:
        """Record and log that a group failed."""
        write_json(self.sweep.folder(group) / "failed.json", {"error": error})
        log = self.sweep.folder(group) / "log.txt"
        say(f"{group.trials[0].arm} failed, the others continue: {error} (see {log})")


def is_trained(folder: Path) -> bool:
    """Return whether train.py has nothing left to do in a group's folder."""
    try:
        run = read_run(folder)
    except ValueError:
        return False  # train.py will report what is wrong
    return run is not None and run["status"] in TRAINED


def modified_at(path: Path) -> int | None:
    """Return a file's modification time in nanoseconds; None if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None
