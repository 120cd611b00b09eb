"""run.json's status and the exit code, by which other programs know how a run ended."""

import json
import os
import signal
import time

import pytest

from tests.runs import (
    arguments,
    checksums,
    fails,
    logged,
    read,
    run,
    start,
    status,
    succeed,
    training,
)


@pytest.fixture
def start_training(corpus, tmp_path):
    """Return a function that starts a long run and returns once it trains."""
    processes = []

    # child processes inherit that it is ignored, if the tests run under nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def start_training():
        longer = corpus | {"train.num_steps": 10**6, "train.eval_every_steps": 10**6}
        processes.append(
            start(
                training(tmp_path, **longer | {"train.checkpoint_every_steps": 10**6}),
                start_new_session=True,
            )
        )
        path = tmp_path / "metrics.jsonl"
        while processes[0].poll() is None:
            if path.exists() and path.stat().st_size > 0:
                break
            time.sleep(0.01)
        return processes[0]

    yield start_training
    signal.signal(signal.SIGHUP, before)
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_repeated_signal_to_the_process_group_saves_and_stops(
    start_training, tmp_path
):
    """As when a scheduler signals a group, and a parent in it its children."""
    process, number = start_training(), signal.SIGHUP  # others: tests/faults
    assert status(tmp_path) == "running"
    os.killpg(process.pid, number)
    for _ in range(3):
        time.sleep(0.05)
        process.send_signal(number)
    log = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number, log
    assert "SIGHUP" in log and "Traceback" not in log
    assert status(tmp_path) == "stopped"
    assert checksums(tmp_path, logged(tmp_path)[-1]["step"]), "of its last step"


@pytest.mark.slow
def test_a_run_whose_trials_all_diverge_exits_with_1(corpus, tmp_path):
    """Also when it is started again, with as many steps or fewer."""
    overrides = corpus | {"optimizer.learning_rate": 1e30}
    for steps in (60, 60, 2):
        args = training(tmp_path, **overrides | {"train.num_steps": steps})
        ran = run(args)
        assert ran.returncode == 1 and "Traceback" not in ran.stderr, ran.stderr
        assert status(tmp_path) == "diverged"
        assert "diverged" in ran.stderr
        if "is trained already" not in ran.stderr:
            assert "checkpoints" in ran.stderr.splitlines()[-1]
            assert "optimizer.learning_rate" in ran.stderr.splitlines()[-1]
    ran = run(arguments("eval.py", workdir=tmp_path, split="val", beam_size=1))
    assert ran.returncode == 0, ran.stderr


def test_a_failed_start_leaves_the_status_of_the_run(workdir, corpus):
    before = (workdir / "run.json").read_bytes()
    ran = run(training(workdir, **corpus | {"data.directory": workdir / "none"}))
    fails(ran, workdir / "none")
    assert (workdir / "run.json").read_bytes() == before


@pytest.mark.parametrize(
    "script, words, flags",
    [
        ("train.py", [], None),
        ("eval.py", [], {"split": "val"}),
        ("predict.py", [], {}),
        ("heads.py", ["describe"], {}),
    ],
)
def test_a_workdir_of_another_format_version_is_named_and_left(
    workdir, corpus, script, words, flags
):
    facts = read(workdir, "run.json")
    path = workdir / "run.json"
    path.write_text(json.dumps(facts | {"format_version": 2}))
    before = snapshot(workdir)
    args = arguments(script, *words, workdir=workdir, **flags or {})
    args = training(workdir, **corpus) if flags is None else args
    fails(run(args), path, "format_version 2")
    assert snapshot(workdir) == before


def snapshot(folder) -> dict:
    """Return the content of every file in a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != ".lock"}


@pytest.mark.slow
def test_a_finished_run_that_is_given_more_steps_finishes_again(workdir, corpus):
    ran = succeed(training(workdir, **corpus | {"train.num_steps": 62}))
    assert "Resuming" in ran.stderr and status(workdir) == "finished"
    assert logged(workdir)[-1]["step"] == 62
