"""Sweeps beyond one process: a real Ray cluster here, submitit's local executor."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from sweep_cases import finish, metrics, rows, start, sweep


def processes(*parts):
    """Ids of the processes whose command line has all parts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if all(part in line for part in parts):
                found.append(int(path.parent.name))
    return found


def parent(process):
    """The id of a process's parent."""
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")")[-1].split()[1])


def test_ray_survives_a_worker_killed_at_work(undisturbed, tmp_path, corpus):
    pytest.importorskip("ray", reason="pip install -r requirements-sweeps.txt")
    workdir = tmp_path / "sweep"
    process = start(sweep("run", workdir, corpus, "--launcher=ray"))
    deadline = time.monotonic() + 300
    while not list(workdir.glob("groups/*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    (group,) = processes("sweep.py run", str(workdir), "--group=N=1-")
    worker = parent(group)  # Ray's, in the middle of a group
    assert worker != process.pid
    os.kill(worker, signal.SIGKILL)
    said = process.communicate(timeout=500)[0]
    assert process.returncode == 0 and "All is done" in said, said
    assert metrics(workdir) == metrics(undisturbed)
    assert [row["status"] for row in rows(workdir)] == ["done"] * 4


def test_a_ray_address_that_does_not_answer_is_named(tmp_path, corpus):
    pytest.importorskip("ray", reason="pip install -r requirements-sweeps.txt")
    flags = ("--launcher=ray", "--address=127.0.0.1:9")
    said = finish(sweep("run", tmp_path / "sweep", corpus, *flags), code=2)
    last = said.strip().splitlines()[-1]
    assert "No Ray cluster answers at 127.0.0.1:9" in last and "Traceback" not in said


def test_slurms_array_runs_on_submitits_local_executor(undisturbed, tmp_path, corpus):
    pytest.importorskip("submitit", reason="pip install -r requirements-sweeps.txt")
    workdir = tmp_path / "sweep"
    flags = ("--launcher=slurm", "--address=local", "--resources=timeout_min=9")
    said = finish(sweep("run", workdir, corpus, *flags))
    assert "All is done" in said and "2 groups as jobs" in said
    assert metrics(workdir) == metrics(undisturbed)
    assert [row["status"] for row in rows(workdir)] == ["done"] * 4


def test_no_slurm_is_named(tmp_path, corpus):
    pytest.importorskip("submitit", reason="pip install -r requirements-sweeps.txt")
    if subprocess.run(["which", "sbatch"], capture_output=True).returncode == 0:
        pytest.skip("there is a Slurm here")
    said = finish(sweep("run", tmp_path / "s", corpus, "--launcher=slurm"), code=2)
    assert "needs Slurm's sbatch" in said.strip().splitlines()[-1]
