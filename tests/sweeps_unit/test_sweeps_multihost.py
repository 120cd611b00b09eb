"""The leader's orders and those who follow them, without training."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
from sweep_fakes import options

from headcount.runtime.files import locked
from headcount.runtime.workdir import write_json
from headcount.sweeps import multihost
from headcount.sweeps.plan import Shard
from headcount.sweeps.runner import (
    SIGNALS,
    Runner,
    Stopped,
    eval_command,
    train_command,
)
from headcount.sweeps.settings import open_sweep


@pytest.fixture
def sweep(tmp_path, corpus):
    return open_sweep(options(tmp_path / "s", corpus))


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_follower_builds_the_leaders_command_itself(tmp_path, sweep, monkeypatch):
    meeting = multihost.Meeting(tmp_path / "leader", tmp_path / "order.json")
    announce = partial(multihost.write_order, meeting, "run")
    leader = Runner(sweep, Shard(0, 1), None, ["--coordinator=h:1"], announce)
    monkeypatch.setattr(subprocess, "Popen", lambda command: command)
    group = sweep.groups[1]
    for splits in (None, ["val", "test"]):
        command = leader.start(group, splits)
        order = multihost.read_optional_json(meeting.order)
        own = multihost.ordered_command(sweep, order)
        assert [*own, "--coordinator=h:1"] == command
        assert own == (
            train_command(sweep, group)
            if splits is None
            else eval_command(sweep, group, splits)
        )


def test_an_order_cannot_name_other_programs_or_flags(tmp_path, sweep):
    order = {"number": 1, "do": "run", "group": "../../elsewhere", "splits": None}
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    with pytest.raises(FileNotFoundError, match="groups/elsewhere"):
        multihost.ordered_command(sweep, order)
    order |= {"group": sweep.groups[0].name, "splits": ["--task_file=evil.py", "val"]}
    command = multihost.ordered_command(sweep, order)
    assert "--split=--task_file=evil.py,val" in command
    assert not any(word.startswith("--task_file") for word in command)


def test_a_follower_that_waits_for_an_earlier_process_heeds_signals(
    tmp_path, sweep, handlers
):
    meeting = multihost.Meeting(tmp_path / "leader", tmp_path / "order.json")
    group = sweep.groups[0].name
    order = {"number": 1, "do": "run", "group": group, "splits": None}
    write_json(meeting.order, order)
    with locked(meeting.leader), locked(tmp_path / "claim") as held:
        start = time.monotonic()
        timers = [
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)),
            threading.Timer(8.0, held.close),
        ]
        for timer in timers:
            timer.start()
        try:
            with pytest.raises(Stopped, match="SIGTERM") as stopped:
                multihost.follow(sweep, meeting, tmp_path / "claim", [])
        finally:
            for timer in timers:
                timer.cancel()
        assert stopped.value.number == signal.SIGTERM
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("do", ["end", "run"])
def test_a_follower_ends_with_its_leader(tmp_path, sweep, handlers, do):
    meeting = multihost.Meeting(tmp_path / "leader", tmp_path / "order.json")
    order = {"number": 1, "do": do, "group": "", "splits": None}
    write_json(meeting.order, order)
    if do == "end":
        multihost.follow(sweep, meeting, tmp_path / "claim", [])
        return
    with pytest.raises(Stopped, match="leads the sweep") as stopped:
        multihost.follow(sweep, meeting, tmp_path / "claim", [])
    assert stopped.value.number is None


def test_a_follower_forwards_a_signal_once(tmp_path):
    program = """
import pathlib, signal, sys, time
got = []
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
while not got:
    time.sleep(0.01)
time.sleep(1)
pathlib.Path(sys.argv[1]).write_text(str(len(got)))
"""
    signals = []
    threading.Timer(1.0, signals.extend, ([signal.SIGTERM, signal.SIGTERM],)).start()
    with (tmp_path / "lock").open("w") as lock:
        command = [sys.executable, "-c", program, str(tmp_path / "got")]
        multihost.run_beside(command, lock, signals)
    assert (tmp_path / "got").read_text() == "1"
