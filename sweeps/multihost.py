"""Sweeps in which every group is one program over several hosts.

All hosts call `sweep.py run` with the same workdir and --coordinator. The first one
leads: it runs the sweep, and writes down each process that it starts. The others
follow: they start the same process with their own flags, until the leader is done.
"""

import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from headcount.runtime.files import locked
from headcount.runtime.logging import say
from headcount.runtime.schema import Number, Optional, matches
from headcount.runtime.workdir import write_json
from headcount.sweeps.plan import Group, Shard
from headcount.sweeps.runner import POLL, SIGNALS, Runner, Stopped, group_command
from headcount.sweeps.store import Sweep, read_group, read_optional_json
from headcount.sweeps.table import collect
from headcount.sweeps.workers import Worker

# An order says what to run, never how: a follower runs our own scripts only.
ORDER = {
    "number": Number(0),
    "do": frozenset(("run", "end")),
    "group": str,
    "splits": Optional(str),
}


class Meeting(NamedTuple):
    """Files by which the hosts that share (a part of) a sweep coordinate."""

    leader: Path  # locked by the process that leads
    order: Path  # what all hosts are to run, or that the leader has finished


def run(
    sweep: Sweep,
    groups: list[Group] | Shard,
    part: str,
    process: str,
    arguments: list[str],
) -> list[dict]:
    """Lead the sweep, or follow its leader; return the table's rows.

    Args:
        sweep, groups: see `sweeps.runner.Runner`.
        part: a name for these groups, among others that other hosts work on.
        process: a name for this process among those of its host.
        arguments: the flags with which this process connects to the others.

    Raises:
        Stopped: a signal was received here or by the leader.
    """
    names = (f".{part}.leader", f".{part}.order.json")
    meeting = Meeting(*(sweep.workdir / name for name in names))
    for _ in range(3):  # a follower locks the file for a moment to see if it is led
        with locked(meeting.leader, wait=False) as lead:
            if lead is not None:
                write_json(meeting.order, None)
                leader = Leader(sweep, groups, meeting, arguments)
                rows = leader.run()
                leader.order("end")
                return rows
        time.sleep(POLL)
    claim = sweep.workdir / f".{socket.gethostname()}.{process}"
    follow(sweep, meeting, claim, arguments)
    return collect(sweep.extended(propose=False))


class Leader(Runner):
    """Runs groups on the devices of all hosts, one group at a time."""

    def __init__(self, sweep: Sweep, groups, meeting: Meeting, arguments: list[str]):
        super().__init__(sweep, groups, [Worker({})])
        self.meeting, self.arguments = meeting, arguments

    def command(self, group: Group, splits: list[str] | None) -> list[str]:
        """Return the command of a process of a group, as it runs on this host."""
        return [*super().command(group, splits), *self.arguments]

    def start(
        self, group: Group, splits: list[str] | None, **options
    ) -> subprocess.Popen:
        """Start a process here, and make the followers start it too."""
        self.order("run", group.name, splits)
        return super().start(group, splits, **options)

    def order(self, do: str, group: str = "", splits: list[str] | None = None) -> None:
        """Write down what all hosts are to do."""
        splits = None if splits is None else ",".join(splits)
        values = (time.time_ns(), do, group, splits)
        write_json(self.meeting.order, dict(zip(ORDER, values, strict=True)))


def follow(sweep: Sweep, meeting: Meeting, claim: Path, arguments: list[str]) -> None:
    """Start what the leader starts, until it has finished.

    Args:
        claim: locked by the process that works on this host. One that outlives a killed
            follower is waited for.

    Raises:
        Stopped: the leader ended before it had finished, or a signal was received.
    """
    signals = []
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: signals.append(number))
    say("Another process leads the sweep; this one follows.")
    done = None
    while not signals:
        time.sleep(POLL)  # first: a new leader clears the order of the last one
        with locked(meeting.leader, wait=False) as lead:
            order = read_optional_json(meeting.order)
        if not matches(order, ORDER):
            order = None
        if lead is not None:
            if order is not None and order["do"] == "end":
                return
            raise Stopped("The process that leads the sweep has ended")
        if order is not None and order["do"] == "run" and order["number"] != done:
            with locked(claim, wait=False) as lock:  # waiting would block signals
                if lock is not None and read_optional_json(meeting.order) == order:
                    done = order["number"]
                    command = [*ordered_command(sweep, order), *arguments]
                    run_beside(command, lock, signals)
    raise Stopped(signal.Signals(signals[0]).name, signals[0])


def ordered_command(sweep: Sweep, order: dict) -> list[str]:
    """Return the command of an order, built from this host's own sweep and flags."""
    folder = sweep.workdir / "groups" / os.path.basename(order["group"])
    splits = order["splits"]
    return group_command(
        sweep,
        read_group(folder / "group.json"),
        None if splits is None else splits.split(","),
    )


def run_beside(command: list[str], lock, signals: list[int]) -> None:
    """Run a process to its end; forward the first signal to it."""
    say(shlex.join(["python", *command[1:]]))
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),)
    )
    while child.poll() is None:
        if signals:
            child.send_signal(signals[0])
            child.wait()
        time.sleep(POLL / 5)
