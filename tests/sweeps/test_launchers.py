"""Sweeps beyond one process: submitit's local executor, Ray's errors."""

import os
import signal
import subprocess

import pytest
from sweep_cases import (
    end,
    finish,
    metrics,
    parent,
    processes,
    rows,
    start,
    sweep,
    wait_for,
)


def test_a_ray_address_that_does_not_answer_is_named(tmp_path, corpus):
    pytest.importorskip("ray", reason="pip install -r requirements-sweeps.txt")
    flags = ("--launcher=ray", "--address=127.0.0.1:9")
    printed = finish(sweep("run", tmp_path / "sweep", corpus, *flags), code=2)
    last = printed.strip().splitlines()[-1]
    assert "--address=127.0.0.1:9" in last and "Traceback" not in printed


def test_a_killed_job_of_slurm_is_named_and_resumed(uninterrupted, tmp_path, corpus):
    """On the local executor; a kill takes the job and what it has started."""
    pytest.importorskip("submitit", reason="pip install -r requirements-sweeps.txt")
    workdir = tmp_path / "sweep"
    flags = ("--launcher=slurm", "--address=local", "--resources=timeout_min=9")
    process = start(sweep("run", workdir, corpus, *flags))
    wait_for(lambda: list(workdir.glob("groups/*/metrics.jsonl")), process)
    (group,) = processes("sweep.py run", str(workdir), "--group=N=1-")
    trainings = processes("train.py", f"{workdir}/groups/N=1-")
    for number in (parent(group), group, *trainings):
        os.kill(number, signal.SIGKILL)
    printed = end(process, code=1)
    assert "Rerun the same command" in printed and "Traceback" not in printed
    assert "2 groups as jobs" in printed
    assert "Everything is done" in finish(sweep("run", workdir, corpus, *flags))
    assert metrics(workdir) == metrics(uninterrupted)
    assert [row["status"] for row in rows(workdir)] == ["done"] * 4


def test_a_missing_slurm_is_named(tmp_path, corpus):
    pytest.importorskip("submitit", reason="pip install -r requirements-sweeps.txt")
    if subprocess.run(["which", "sbatch"], capture_output=True).returncode == 0:
        pytest.skip("there is a Slurm here")
    printed = finish(sweep("run", tmp_path / "s", corpus, "--launcher=slurm"), code=2)
    assert "sbatch" in printed.strip().splitlines()[-1]
