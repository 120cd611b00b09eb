"""A sweep whose every group is one program over several hosts.

All hosts call `sweep.py run` with the same workdir and --coordinator. The first one
leads: it runs the sweep, and writes down each process that it starts. The others start
the same process beside it, with their own flags, until the leader ends.
"""

import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from headcount.runtime.logging import say
from headcount.runtime.workdir import write_json
from headcount.sweeps.records import read_json
from headcount.sweeps.runner import WAIT, Runner, Stopped, Worker, script
from headcount.sweeps.store import Sweep, locked


class Place(NamedTuple):
    """Where the hosts that work on (a part of) a sweep find each other."""

    leader: Path  # locked by the process that leads
    order: Path  # what all are to run, or that the leader is done


def run(sweep: Sweep, groups, part: str, process: str, arguments) -> list[dict]:
    """Lead the sweep, or follow who leads it; returns the table's rows.

    Args:
        sweep, groups: see `sweeps.runner.Runner`.
        part: a name for these groups among others that other hosts work on.
        process: a name for this process among those of its host.
        arguments: the flags by which this process meets the others.

    Raises:
        Stopped: by a signal, here or where the sweep is led.
    """
    where = Place(*(sweep.workdir / f".{part}.{x}" for x in ("leader", "order.json")))
    for _ in range(3):  # a follower may hold the lock to see whether it is led
        with locked(where.leader, wait=False) as lead:
            if lead is not None:
                write_json(where.order, None)
                leader = Leader(sweep, groups, where, arguments)
                rows = leader.run()
                leader.order("end")
                return rows
        time.sleep(WAIT)
    follow(where, sweep.workdir / f".{socket.gethostname()}.{process}", arguments)
    return sweep.extended(propose=False).collect()


class Leader(Runner):
    """Works through groups with the devices of all hosts."""

    def __init__(self, sweep: Sweep, groups, where: Place, arguments: list[str]):
        super().__init__(sweep, groups, [Worker({})])
        self.where, self.arguments = where, arguments

    def start(self, command: list[str], **options) -> subprocess.Popen:
        """Start a process here, and have the others start it too."""
        _, name, *flags = command  # each host has its own Python
        self.order("run", name=Path(name).name, flags=flags)
        return super().start([*command, *self.arguments], **options)

    def order(self, what: str, **more) -> None:
        """Write down what all are to do."""
        write_json(self.where.order, {"what": what, "number": time.time_ns()} | more)


def follow(where: Place, claim: Path, arguments: list[str]) -> None:
    """Start what the leader starts, until it is done.

    `claim` is locked by the process that is at work here: one that outlives a killed
    follower is waited for.

    Raises:
        Stopped: the leader ended before it was done, or a signal came here.
    """
    signals = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    say("Another process leads the sweep; this one follows.")
    done = None
    while not signals:
        time.sleep(WAIT)  # first: a new leader clears the order of the last one
        with locked(where.leader, wait=False) as lead:
            order = read_json(where.order) or {"what": "wait"}
        if lead is not None:
            if order["what"] == "end":
                return
            raise Stopped("The process that leads the sweep has ended")
        if order["what"] == "run" and order["number"] != done:
            with locked(claim, wait=False) as held:  # or no signal would be seen
                if held is not None and read_json(where.order) == order:
                    done = order["number"]
                    command = [*script(order["name"]), *order["flags"], *arguments]
                    accompany(command, held, signals)
    raise Stopped(signal.Signals(signals[0]).name)


def accompany(command: list[str], claim, signals: list[int]) -> None:
    """Run a process to its end, and pass on that it is to stop."""
    say(shlex.join(["python", *command[1:]]))
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, pass_fds=(claim.fileno(),)
    )
    while child.poll() is None:
        if signals:
            child.terminate()
            child.wait()
        time.sleep(WAIT / 5)
