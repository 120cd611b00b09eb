"""Sweeps in which every group is one program over several hosts.

All hosts call `sweep.py run` with the same workdir and --coordinator. The first one
leads: it runs the sweep, and records each process that it starts in a file. The others
follow: they start the same processes with their own flags, until the leader is done.
"""

import os
import shlex
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headcount.runtime.files import locked
from headcount.runtime.logging import say
from headcount.runtime.schema import Number, Optional, matches
from headcount.runtime.workdir import write_json
from headcount.sweeps.plan import Group, Shard
from headcount.sweeps.runner import POLL, SIGNALS, Runner, Stopped, group_command
from headcount.sweeps.store import Sweep, read_group, read_optional_json
from headcount.sweeps.workers import Worker

# An order names a group, not a command: followers must run only our own scripts.
ORDER = {
    "number": Number(0),
    "do": frozenset(("run", "end")),
    "group": str,
    "splits": Optional([str]),
}


class Meeting(NamedTuple):
    """Files through which the hosts that share (a part of) a sweep coordinate."""

    leader: Path  # locked by the leading process
    order: Path  # what all hosts must run next, or that the leader has finished


def run(
    sweep: Sweep,
    groups: list[Group] | Shard,
    part: str,
    process: str,
    arguments: list[str],
) -> None:
    """Lead the sweep, or follow its leader.

    Args:
        sweep, groups: see `sweeps.runner.Runner`.
        part: name of these groups; other hosts may work on other parts.
        process: name of this process, unique on its host.
        arguments: flags with which this process connects to the others.

    Raises:
        Stopped: a signal was received here or by the leader.
    """
    names = (f".{part}.leader", f".{part}.order.json")
    meeting = Meeting(*(sweep.workdir / name for name in names))
    # retry: a follower also locks the file, briefly, to see whether there is a leader
    for _ in range(3):
        with locked(meeting.leader, wait=False) as lead:
            if lead is not None:
                write_json(meeting.order, None)
                announce = partial(write_order, meeting, "run")
                runner = Runner(sweep, groups, [Worker({})], arguments, announce)
                runner.run()
                write_order(meeting, "end")
                return
        time.sleep(POLL)
    claim = sweep.workdir / f".{socket.gethostname()}.{process}"
    follow(sweep, meeting, claim, arguments)


def write_order(
    meeting: Meeting, do: str, group: str = "", splits: list[str] | None = None
) -> None:
    """Write what all hosts must do next to the order file."""
    values = (time.time_ns(), do, group, splits)
    write_json(meeting.order, dict(zip(ORDER, values, strict=True)))


def follow(sweep: Sweep, meeting: Meeting, claim: Path, arguments: list[str]) -> None:
    """Start the processes that the leader starts, until the leader has finished.

    Args:
        claim: file locked by the process that works on this host. If a process outlives
            a killed follower, the next follower waits for it.

    Raises:
        Stopped: the leader ended without finishing, or a signal was received.
    """
    signals = []
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: signals.append(number))
    say("Another process leads the sweep; this one follows.")
    done = None
    while not signals:
        time.sleep(POLL)  # first: a new leader needs time to clear the old order
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
    """Build the command of an order from this host's own sweep and flags."""
    folder = sweep.workdir / "groups" / os.path.basename(order["group"])
    return group_command(sweep, read_group(folder / "group.json"), order["splits"])


def run_beside(command: list[str], lock, signals: list[int]) -> None:
    """Run a command until it ends; forward the first signal to it."""
    say(shlex.join(["python", *command[1:]]))
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(lock.fileno(),)
    )
    while child.poll() is None:
        if signals:
            child.send_signal(signals[0])
            child.wait()
        time.sleep(POLL / 5)
