"""Planned looks in real sweeps: killed and resumed, shared by shards, on Ray."""

import csv
import os
import random
import signal
import time

import pytest
from sweep_cases import (
    end,
    finish,
    kill,
    metrics,
    parent,
    processes,
    rows,
    start,
    sweep,
    wait_for,
)

FLAGS = ("--seeds=2:4", "--looks=2,4")


def planned(workdir, corpus, *flags):
    return sweep("run", workdir, corpus, *FLAGS, *flags)


def verdicts(workdir):
    with (workdir / "verdicts.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, corpus):
    """A sweep with two looks that ran without interruption."""
    workdir = tmp_path_factory.mktemp("whole") / "sweep"
    assert "Everything is done" in finish(planned(workdir, corpus))
    return workdir


def test_undecided_arms_get_seeds_in_stages(whole):
    (verdict,) = verdicts(whole)
    seeds = {
        arm: sorted(row["seed"] for row in rows(whole) if row["arm"] == arm)
        for arm in ("N=1", "N=2")
    }
    is_early = verdict["verdict"] != "undecided" and verdict["seeds"] == "2"
    assert seeds["N=1"] == seeds["N=2"] == list(range(2 if is_early else 4))


def test_shards_of_planned_looks_killed_at_any_moment_end_with_the_same_bits(
    whole, tmp_path, corpus
):
    seed = random.randrange(10**6)
    generator, workdir = random.Random(seed), tmp_path / "sweep"

    def shards():
        return [start(planned(workdir, corpus, f"--shard={i}/2")) for i in (0, 1)]

    for _ in range(2):
        both = shards()
        time.sleep(generator.uniform(5, 40))
        for process in both:
            kill(process)
    for _ in range(3):  # what waits for others is rerun
        printed = [end(process) for process in shards()]
        if all("Everything is done" in text for text in printed):
            break
    assert metrics(workdir) == metrics(whole), f"random seed {seed}"
    assert verdicts(workdir) == verdicts(whole), f"random seed {seed}"


def test_planned_looks_on_ray_survive_the_loss_of_a_worker(
    whole, tmp_path, corpus, monkeypatch
):
    pytest.importorskip("ray", reason="pip install -r requirements-sweeps.txt")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or other tests go first
    workdir = tmp_path / "sweep"
    process = start(planned(workdir, corpus, "--launcher=ray"))
    wait_for(lambda: list(workdir.glob("groups/N=1-*/metrics.jsonl")), process)
    (group,) = processes("sweep.py run", str(workdir), "--group=N=1-")
    worker = parent(group)  # Ray's, in the middle of a group
    assert worker != process.pid
    os.kill(worker, signal.SIGKILL)
    assert "Everything is done" in end(process)
    assert metrics(workdir) == metrics(whole)
    assert verdicts(workdir) == verdicts(whole)
    assert [row["status"] for row in rows(workdir)] == ["done"] * len(rows(whole))
