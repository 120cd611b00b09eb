"""A sweep whose groups are programs of two processes, as if on two hosts."""

import json
import signal

import pytest
from sweep_cases import (
    TRANSLATION,
    end,
    finish,
    metrics,
    rows,
    start,
    started,
    sweep,
    wait_for,
)

from headcount.runtime.files import locked
from tests.processes import free_address


def is_led(workdir):
    """Whether a process leads the sweep, so that the next one follows."""
    if not (workdir / ".all.leader").exists():
        return False
    with locked(workdir / ".all.leader", wait=False) as lead:
        return lead is None


@pytest.fixture
def pair(tmp_path, corpus):
    """Return a function that starts the sweep in two processes; the first one leads."""
    begun = []

    def begin(**changes):
        address = free_address()
        both = []
        for index in range(2):
            flags = [f"--coordinator={address}", "--num_processes=2"]
            flags.append("--coordinator_timeout=60")
            command = sweep("run", tmp_path / "sweep", corpus, *flags, **changes)
            both.append(start([*command, f"--process_id={index}"]))
            if index == 0:
                wait_for(lambda: is_led(tmp_path / "sweep"), both[0])
        begun.extend(both)
        return both

    yield begin
    for process in begun:
        process.kill()


def end_both(both, codes):
    return [end(process, code) for process, code in zip(both, codes, strict=True)]


def test_two_hosts_run_the_same_sweep_as_one(pair, corpus, tmp_path):
    """Translators, for the hosts then also decode together."""
    alone = tmp_path / "alone"
    finish(sweep("run", alone, corpus, **TRANSLATION))
    first, second = end_both(pair(**TRANSLATION), [0, 0])
    assert "Everything is done" in first and "Everything is done" in second
    assert "this one follows" in second and "this one follows" not in first
    folder = tmp_path / "sweep"
    assert started(folder) == started(alone)
    for path in folder.glob("groups/*/run.json"):
        assert json.loads(path.read_text())["processes"] == 2
    ours, theirs = metrics(folder), metrics(alone)
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        for here, there in zip(found, theirs[name], strict=True):
            assert here[:2] == there[:2]
            both = zip(here[2:], there[2:], strict=True)
            assert all(a == b or abs(a - b) < 1e-4 * b for a, b in both)
    columns = ("id", "arm", "seed", "status", "steps", "test_bleu", "test_chrf")
    here, there = (
        [tuple(row[c] for c in columns) for row in rows(f)] for f in (folder, alone)
    )
    assert here == there


def test_hosts_that_stop_or_are_killed_resume(pair, uninterrupted, tmp_path):
    def steps():
        return sum(map(len, metrics(tmp_path / "sweep").values()))

    def wait_for_more(both):
        before = steps()
        wait_for(lambda: steps() > before, both[0])

    both = pair()
    wait_for_more(both)
    both[1].send_signal(signal.SIGTERM)
    # the follower got the signal, the leader only sees that its training stopped
    first, second = end_both(both, [1, 128 + signal.SIGTERM])
    assert "Rerun the same command" in first and "SIGTERM" in second

    both = pair()
    wait_for_more(both)
    both[0].kill()  # its train.py continues
    _, second = end_both(both, [-signal.SIGKILL, 1])
    assert "The process that leads the sweep has ended" in second

    end_both(pair(), [0, 0])
    found = rows(tmp_path / "sweep")
    assert [(r["status"], r["steps"]) for r in found] == [("done", 60)] * 4
    for name, lines in metrics(tmp_path / "sweep").items():
        assert [line[:2] for line in lines] == [
            line[:2] for line in metrics(uninterrupted)[name]
        ]
