"""A sweep whose groups are programs of two processes, as if each had its host."""

import json
import signal
import time

import pytest
from sweep_cases import finish, metrics, rows, start, started, sweep

from headcount.sweeps.store import locked
from tests.processes import free_address


def leads(workdir, process):
    """Whether somebody leads the sweep, so that the next one follows."""
    assert process.poll() is None
    if not (workdir / ".all.leader").exists():
        return False
    with locked(workdir / ".all.leader", wait=False) as lead:
        return lead is None


@pytest.fixture
def pair(tmp_path, corpus):
    """Starts the sweep in two processes, of which the first leads."""
    begun = []

    def begin():
        address = free_address()
        both = []
        for index in range(2):
            flags = [f"--coordinator={address}", "--num_processes=2"]
            flags.append("--coordinator_timeout=60")
            command = sweep("run", tmp_path / "sweep", corpus, *flags)
            both.append(start([*command, f"--process_id={index}"]))
            while index == 0 and not leads(tmp_path / "sweep", both[0]):
                time.sleep(0.2)
        begun.extend(both)
        return both

    yield begin
    for process in begun:
        process.kill()


def ended(both, codes):
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == codes, "\n".join(said)
    return said


def test_two_hosts_run_a_sweep_as_one_does(pair, undisturbed, tmp_path):
    first, second = ended(pair(), [0, 0])
    assert "All is done" in first and "All is done" in second
    assert "this one follows" in second and "this one follows" not in first
    folder = tmp_path / "sweep"
    assert started(folder) == started(undisturbed)
    for path in folder.glob("groups/*/run.json"):
        assert json.loads(path.read_text())["processes"] == 2
    ours, theirs = metrics(folder), metrics(undisturbed)
    assert ours.keys() == theirs.keys()
    for name, found in ours.items():
        for here, there in zip(found, theirs[name], strict=True):
            assert here[:2] == there[:2]
            both = zip(here[2:], there[2:], strict=True)
            assert all(a == b or abs(a - b) < 1e-4 * b for a, b in both)
    columns = ("id", "arm", "seed", "status", "steps", "test_bleu", "test_chrf")
    here, there = (
        [tuple(row[c] for c in columns) for row in rows(f)]
        for f in (folder, undisturbed)
    )
    assert here == there


def test_hosts_that_stop_or_are_killed_go_on(pair, undisturbed, tmp_path):
    def steps():
        return sum(map(len, metrics(tmp_path / "sweep").values()))

    def wait_for_more(both):
        before = steps()
        while steps() <= before:
            assert all(process.poll() is None for process in both)
            time.sleep(0.1)

    both = pair()
    wait_for_more(both)
    both[1].send_signal(signal.SIGTERM)
    first, second = ended(both, [1, 1])
    assert "the same command goes on" in first and "SIGTERM" in second

    both = pair()
    wait_for_more(both)
    both[0].kill()  # train.py, which it started, goes on
    _, second = ended(both, [-signal.SIGKILL, 1])
    assert "The process that leads the sweep has ended" in second

    ended(pair(), [0, 0])
    found = rows(tmp_path / "sweep")
    assert [(r["status"], r["steps"]) for r in found] == [("done", 60)] * 4
    for name, lines in metrics(tmp_path / "sweep").items():
        assert [line[:2] for line in lines] == [
            line[:2] for line in metrics(undisturbed)[name]
        ]


def test_a_ray_task_is_not_several_hosts(tmp_path, corpus):
    flags = ("--launcher=ray", "--coordinator=auto")
    said = finish(sweep("run", tmp_path / "sweep", corpus, *flags), code=2)
    assert "A Ray task is one process" in said.splitlines()[-1]
