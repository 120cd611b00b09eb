"""Sweeps that are signalled, killed and shared at random moments, again and again.

`HEADCOUNT_FAULTS=10 make test-sweeps` does it ten times per test.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

from sweep_cases import ROOT, end, finish, metrics, rows, scores, start, started, sweep

from tests.processes import repeats


def random_moments():
    """Return a seed, which messages name, and its generator."""
    seed = random.randrange(10**6)
    return seed, random.Random(seed)


def same_sweep(workdir, uninterrupted, seed):
    """Check that a sweep lost nothing and did nothing twice."""
    assert metrics(workdir) == metrics(uninterrupted), f"seed {seed}"
    assert scores(workdir) == scores(uninterrupted), f"seed {seed}"
    assert not list(workdir.glob("groups/*/failed.json")), f"seed {seed}"
    for name, commands in started(workdir).items():
        # what was killed is started again, what was finished is not
        last = [i for i, c in enumerate(commands) if c == "train"][-1]
        assert set(commands[:last]) <= {"train"}, f"seed {seed}: {name}"


def test_signals_to_the_group_of_a_sweep(uninterrupted, tmp_path, corpus):
    """A random one, at random moments, once or several times."""
    seed, generator = random_moments()
    number = generator.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    workdir = tmp_path / "sweep"
    for _ in range(repeats(1)):
        process = start(sweep("run", workdir, corpus))
        time.sleep(generator.uniform(3, 25))
        for _ in range(generator.choice((1, 4))):
            if process.poll() is None:
                os.killpg(process.pid, number)
            time.sleep(0.1)
        printed = process.communicate(timeout=120)[0]
        told = f"seed {seed}: {printed}"
        # by itself, before any of our code could take the signal; 0: it was done
        assert process.returncode in (128 + number, -number, 0), told
        assert "Traceback" not in printed, told
    finish(sweep("run", workdir, corpus))
    same_sweep(workdir, uninterrupted, seed)


def test_two_sweeps_on_one_workdir_killed(uninterrupted, tmp_path, corpus):
    """One or both, alone or with their processes, while the other goes on."""
    seed, generator = random_moments()
    workdir = tmp_path / "sweep"
    both = [start(sweep("run", workdir, corpus)) for _ in range(2)]
    for _ in range(repeats(2)):
        time.sleep(generator.uniform(3, 12))
        for index in generator.choice([[0], [1], [0, 1]]):
            send = generator.choice((os.kill, os.killpg))
            if both[index].poll() is None:
                send(both[index].pid, signal.SIGKILL)
            both[index].communicate()
            both[index] = start(sweep("run", workdir, corpus))
    for process in both:
        assert "Everything is done" in end(process), f"seed {seed}"
    same_sweep(workdir, uninterrupted, seed)


def test_a_report_killed_at_random_moments(uninterrupted, tmp_path):
    """Its files are the last ones or the new ones, and the same once it ends."""
    seed, generator = random_moments()
    command = [sys.executable, "sweep.py", "report", f"--workdir={uninterrupted}"]
    began = time.monotonic()
    finish(command)
    seconds = time.monotonic() - began
    wanted = written(uninterrupted)
    assert {"report.html", "report.md"} <= wanted.keys()
    for _ in range(repeats(2)):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(generator.uniform(0.5, 1) * seconds)
        process.kill()
        process.wait()
        assert written(uninterrupted) == wanted, f"seed {seed}"
    finish(command)
    assert written(uninterrupted) == wanted
    assert not list(uninterrupted.glob(".*.part"))


def written(workdir):
    """Return the files of a report, by name, and the table's rows."""
    files = [p for p in workdir.iterdir() if p.is_file() and p.name[0] != "."]
    found = {p.name: p.read_bytes() for p in files if p.suffix != ".sqlite"}
    return found | {"rows": json.dumps(rows(workdir)).encode()}
