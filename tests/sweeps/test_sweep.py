"""Whole sweeps in real processes: killed, shared, with arms that fail and diverge.

Minutes: every group starts Python three times.
"""

import json
import os
import random
import signal
import sys
import time

from sweep_cases import finish, metrics, rows, start, started, sweep


def test_a_sweep_runs_everything_once(undisturbed):
    assert set(map(tuple, started(undisturbed).values())) == {("train", "val,test")}
    found = rows(undisturbed)
    assert [(r["arm"], r["seed"], r["status"]) for r in found] == [
        (arm, seed, "done") for arm in ("N=1", "N=2") for seed in (0, 1)
    ]
    assert all(r["steps"] == 60 and r["test_chrf"] is not None for r in found)


def test_a_finished_sweep_runs_nothing_again(undisturbed, corpus):
    before = started(undisturbed)
    said = finish(sweep("run", undisturbed, corpus))
    assert "All is done" in said and started(undisturbed) == before


def test_status_and_report_need_the_workdir_alone(undisturbed):
    table = undisturbed / "sweep.sqlite"
    made = table.stat().st_mtime_ns
    said = finish([sys.executable, "sweep.py", "status", f"--workdir={undisturbed}"])
    assert "120/120" in said and table.stat().st_mtime_ns == made
    finish([sys.executable, "sweep.py", "report", f"--workdir={undisturbed}"])
    html = (undisturbed / "report.html").read_text()
    assert "One head or two?" in html and html.count("<svg") >= 2


def test_killed_at_any_moment_it_ends_as_undisturbed(undisturbed, tmp_path, corpus):
    """kill -9 of the sweep, or of all its processes: nothing is done twice or lost."""
    seed = random.randrange(10**6)
    generator = random.Random(seed)
    workdir = tmp_path / "sweep"
    for _ in range(3):
        process = start(sweep("run", workdir, corpus))
        time.sleep(generator.uniform(4, 25))
        kill = generator.choice((os.kill, os.killpg))
        kill(process.pid, signal.SIGKILL)
        process.communicate()
    finish(sweep("run", workdir, corpus))
    assert metrics(workdir) == metrics(undisturbed), f"random seed {seed}"
    columns = ("id", "arm", "seed", "status", "steps", "dev_bleu", "test_chrf")
    ours, theirs = (
        sorted(tuple(row[c] for c in columns) for row in rows(folder))
        for folder in (workdir, undisturbed)
    )
    assert ours == theirs, f"random seed {seed}"
    for name, commands in started(workdir).items():
        # what was killed at work is started again, what was finished is not
        assert commands[-1].endswith("test"), (name, seed)
        trained = [i for i, c in enumerate(commands) if c == "train"][-1]
        assert set(commands[:trained]) <= {"train"}, (name, seed)


def test_two_sweeps_share_a_workdir(undisturbed, tmp_path, corpus):
    both = [start(sweep("run", tmp_path / "sweep", corpus)) for _ in range(2)]
    for process in both:
        said = process.communicate(timeout=500)[0]
        assert process.returncode == 0 and "All is done" in said, said
    assert started(tmp_path / "sweep") == started(undisturbed)
    assert metrics(tmp_path / "sweep") == metrics(undisturbed)
    assert len(rows(tmp_path / "sweep")) == 4


def test_a_signal_saves_and_shards_share_the_rest(undisturbed, tmp_path, corpus):
    workdir = tmp_path / "sweep"
    process = start(sweep("run", workdir, corpus))
    while not list(workdir.glob("groups/*/metrics.jsonl")) and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    said = process.communicate(timeout=100)[0]
    assert process.returncode == 1 and "SIGTERM: the same command goes on" in said
    for shard in ("0/2", "1/2"):
        finish(sweep("run", workdir, corpus, f"--shard={shard}"))
    assert metrics(workdir) == metrics(undisturbed)
    assert {row["status"] for row in rows(workdir)} == {"done"}


def test_a_failed_arm_does_not_stop_the_others(tmp_path, corpus):
    workdir = tmp_path / "sweep"
    flag = "--resources=cores=1"  # both at once, where there are two
    said = finish(sweep("run", workdir, corpus, flag, ablation="broken"), code=1)
    assert "max_length=1 failed, the others go on: " in said
    found = {(r["arm"], r["status"]) for r in rows(workdir)}
    assert found == {("max_length=12", "done"), ("max_length=1", "failed")}
    (error,) = {r["error"] for r in rows(workdir)} - {None}
    assert "no training pair is left" in error


def test_a_diverged_trial_is_told_and_the_rest_scored(tmp_path, corpus):
    """One learning rate diverges; dev selects the other, and only that is tested."""
    workdir = tmp_path / "sweep"
    tune = "--tune=optimizer.learning_rate=0.003,1e30"
    said = finish(sweep("run", workdir, corpus, tune, "--config.train.num_steps=30"))
    assert "diverged: N=1" in said
    assert said.count("/120 ") == 2  # the steps of all four trials of an arm
    status = {
        (r["arm"], json.loads(r["nuisance"])["optimizer.learning_rate"], r["status"])
        for r in rows(workdir)
    }
    assert status == {
        (arm, rate, told)
        for arm in ("N=1", "N=2")
        for rate, told in ((0.003, "done"), (1e30, "diverged"))
    }
    assert {r["selected"] for r in rows(workdir) if r["status"] == "done"} == {1}
