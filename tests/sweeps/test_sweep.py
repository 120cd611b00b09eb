"""Whole sweeps in real processes: killed, signalled, shared, failing, diverging.

Minutes: every group starts Python three times.
"""

import json
import os
import signal
import sys

from sweep_cases import (
    TRANSLATION,
    end,
    finish,
    metrics,
    rows,
    start,
    started,
    sweep,
    train_pid,
    wait_for,
)


def test_a_sweep_runs_everything_once(uninterrupted):
    commands = set(map(tuple, started(uninterrupted).values()))
    assert commands == {("train", "val,test")}
    found = rows(uninterrupted)
    assert [(r["arm"], r["seed"], r["status"]) for r in found] == [
        (arm, seed, "done") for arm in ("N=1", "N=2") for seed in (0, 1)
    ]
    assert all(r["steps"] == 60 and r["test_loss"] is not None for r in found)


def test_a_finished_sweep_runs_nothing_again(uninterrupted, corpus):
    before = started(uninterrupted)
    assert "Everything is done" in finish(sweep("run", uninterrupted, corpus))
    assert started(uninterrupted) == before


def test_status_and_report_need_only_the_workdir(uninterrupted):
    table = uninterrupted / "sweep.sqlite"
    made = table.stat().st_mtime_ns
    printed = finish(
        [sys.executable, "sweep.py", "status", f"--workdir={uninterrupted}"]
    )
    assert "120/120" in printed and table.stat().st_mtime_ns == made
    finish([sys.executable, "sweep.py", "report", f"--workdir={uninterrupted}"])
    html = (uninterrupted / "report.html").read_text()
    assert "One head or two?" in html and html.count("<svg") >= 2


def test_a_signal_to_the_training_alone_stops_the_sweep(
    uninterrupted, tmp_path, corpus
):
    workdir = tmp_path / "sweep"
    process = start(sweep("run", workdir, corpus))
    wait_for(lambda: list(workdir.glob("groups/*/metrics.jsonl")), process)
    os.kill(train_pid(workdir), signal.SIGTERM)
    assert "SIGTERM in one of its processes. Rerun" in end(process, 1)
    assert not list(workdir.glob("groups/*/failed.json"))
    finish(sweep("run", workdir, corpus))
    assert metrics(workdir) == metrics(uninterrupted)


def test_a_signal_saves_and_shards_share_the_rest(uninterrupted, tmp_path, corpus):
    workdir = tmp_path / "sweep"
    process = start(sweep("run", workdir, corpus))
    wait_for(lambda: list(workdir.glob("groups/*/metrics.jsonl")), process)
    process.terminate()
    assert "SIGTERM. Rerun the same command" in end(process, 128 + signal.SIGTERM)
    (run,) = [json.loads(p.read_text()) for p in workdir.glob("groups/*/run.json")]
    assert run["status"] == "stopped"
    assert not list(workdir.glob("groups/*/failed.json"))
    for shard in ("0/2", "1/2"):
        finish(sweep("run", workdir, corpus, f"--shard={shard}"))
    assert metrics(workdir) == metrics(uninterrupted)
    assert {row["status"] for row in rows(workdir)} == {"done"}


def test_an_arm_that_fails_does_not_stop_the_others(tmp_path, corpus):
    workdir = tmp_path / "sweep"
    flag = "--resources=cores=1"  # both arms at once, if there are two cores
    command = sweep("run", workdir, corpus, flag, ablation="broken", **TRANSLATION)
    printed = finish(command, code=1)
    assert "max_length=1 failed, the others continue: " in printed
    found = {(r["arm"], r["status"]) for r in rows(workdir)}
    assert found == {("max_length=12", "done"), ("max_length=1", "failed")}
    assert all(r["test_chrf"] > 0 for r in rows(workdir) if r["status"] == "done")
    (error,) = {r["error"] for r in rows(workdir)} - {None}
    assert "max_length" in error


def test_trials_that_diverge_are_listed_and_the_others_scored(tmp_path, corpus):
    """One learning rate diverges; dev selects the other, and only that is tested."""
    workdir = tmp_path / "sweep"
    tune = "--tune=optimizer.learning_rate=0.003,1e30"
    printed = finish(sweep("run", workdir, corpus, tune, "--config.train.num_steps=30"))
    assert "diverged: N=1" in printed
    assert printed.count("/120 ") == 2  # the steps of all four trials of an arm
    status = {
        (r["arm"], json.loads(r["nuisance"])["optimizer.learning_rate"], r["status"])
        for r in rows(workdir)
    }
    assert status == {
        (arm, rate, status)
        for arm in ("N=1", "N=2")
        for rate, status in ((0.003, "done"), (1e30, "diverged"))
    }
    assert {r["selected"] for r in rows(workdir) if r["status"] == "done"} == {1}
