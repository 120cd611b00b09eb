"""Running groups: commands, exit codes, signals, workers; no real training."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from sweep_fakes import (
    FINISH,
    ROOT,
    finish,
    options,
    start_instead,
    statuses,
    write_run,
)

from headcount.configs import run as config_of_run
from headcount.runtime.files import locked
from headcount.sweeps import workers
from headcount.sweeps.plan import Shard
from headcount.sweeps.runner import Runner, Stopped, eval_command, train_command
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import collect
from headcount.sweeps.workers import local_workers

STOP = FINISH.replace("finished", "stopped")
SCORE = """
import pathlib
for path in pathlib.Path(FOLDER).glob("result-*.json.done"):
    path.rename(path.with_suffix(""))
"""


@pytest.fixture
def sweep(tmp_path, corpus):
    return open_sweep(options(tmp_path / "s", corpus))


def flag_value(command, name):
    (value,) = [c.split("=", 1)[1] for c in command if c.startswith(f"--{name}=")]
    return value


def failures(sweep):
    paths = sweep.workdir.glob("groups/*/failed.json")
    return [json.loads(path.read_text())["error"] for path in paths]


def test_the_train_command_names_what_the_arm_changes(sweep):
    command = train_command(sweep, sweep.groups[1])
    assert "--config.model.attention.num_kv_heads=2" in command
    path = Path(flag_value(command, "trials"))
    assert json.loads(path.read_text()) == [{"seed": 0}, {"seed": 1}]
    path.write_text("[{")  # damaged
    train_command(sweep, sweep.groups[1])
    assert json.loads(path.read_text()) == [{"seed": 0}, {"seed": 1}]


def test_groups_start_from_the_config_that_the_sweep_was_started_with(tmp_path, corpus):
    """Not from the config file as it is now."""
    given = options(tmp_path / "s", corpus)
    sweep = open_sweep(given)
    config = flag_value(train_command(sweep, sweep.groups[1]), "config")
    path, _, workdir = config.partition(":")
    assert Path(path).resolve() == ROOT / "configs" / "run.py"
    assert config_of_run.get_config(workdir).to_dict() == given.config.to_dict()


def test_a_task_of_the_users_own_is_passed_on(tmp_path, corpus):
    file = tmp_path / "task.py"
    sweep = open_sweep(options(tmp_path / "s", corpus, task_file=file))
    for command in (
        train_command(sweep, sweep.groups[0]),
        eval_command(sweep, sweep.groups[0], ["val"]),
    ):
        assert f"--task_file={file}" in command
    again = open_sweep(options(tmp_path / "s", corpus))  # it is not remembered
    assert "task_file" not in str(train_command(again, again.groups[0]))


def test_evaluation_uses_the_tasks_own_options(sweep):
    command = eval_command(sweep, sweep.groups[0], ["val", "test"])
    names = {word.split("=")[0] for word in command if word.startswith("--")}
    assert names == {"--workdir", "--split", "--checkpoint", "--output", "--directory"}


def test_a_sweep_whose_data_have_moved_reads_them_where_they_are(tmp_path, corpus):
    """Also in groups from before."""
    open_sweep(options(tmp_path / "s", corpus))
    moved = shutil.copytree(corpus, tmp_path / "moved")
    given = options(tmp_path / "s", moved)
    sweep = open_sweep(given._replace(overrides={"data.directory": str(moved)}))
    config = flag_value(train_command(sweep, sweep.groups[0]), "config")
    _, _, workdir = config.partition(":")
    assert config_of_run.get_config(workdir).data.directory == str(moved)
    assert f"--directory={moved}" in eval_command(sweep, sweep.groups[0], ["val"])


def test_a_group_is_trained_and_then_scored(sweep):
    sweep = sweep._replace(groups=sweep.groups[:1])
    finish(sweep, 0)
    folder = sweep.folder(sweep.groups[0])
    (folder / "run.json").unlink()
    for path in folder.glob("result-*.json"):
        path.rename(path.with_suffix(".json.done"))
    for _ in range(2):
        runner = Runner(sweep, sweep.groups)
        started = start_instead(runner, FINISH, SCORE)
        runner.run()
        assert set(statuses(sweep).values()) == {"done"}
    assert not started  # the second time there is nothing left to do
    log = (folder / "log.txt").read_text()
    assert [line.split()[2] for line in log.splitlines() if line[0] == "$"] == [
        "train.py",
        "eval.py",
    ]


def test_all_trials_diverging_is_not_a_failure(sweep):
    runner = Runner(sweep, sweep.groups[:1])
    started = start_instead(
        runner, FINISH.replace("finished", "diverged") + "\nraise SystemExit(1)"
    )
    runner.run()
    assert len(started) == 1 and not failures(sweep)  # and there is nothing to score
    assert statuses(sweep)["K=4"] == "diverged"


@pytest.mark.parametrize("program", ["raise SystemExit('no memory')", STOP])
def test_a_process_that_fails_fails_its_group_and_the_rest_goes_on(sweep, program):
    runner = Runner(sweep, Shard(0, 1))
    program = program if "no memory" in program else program + "\nassert False"
    started = start_instead(runner, program)
    runner.run()
    assert len(started) == 3 and set(statuses(sweep).values()) == {"failed"}
    (error,) = set(failures(sweep))
    assert error in ("no memory", "AssertionError")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("saves", [True, False])
def test_a_process_that_a_signal_stopped_has_not_failed(sweep, number, saves):
    """By the exit code of a process that saved first, or that the signal killed."""
    program = f"raise SystemExit(128 + {int(number)})"
    if not saves:
        program = f"import os, signal; signal.signal({int(number)}, signal.SIG_DFL)\n"
        program += f"os.kill(os.getpid(), {int(number)})"
    runner = Runner(sweep, Shard(0, 1))
    started = start_instead(runner, STOP + program)
    with pytest.raises(Stopped, match=signal.Signals(number).name) as stopped:
        runner.run()
    assert stopped.value.number is None  # the sweep itself got none
    assert len(started) == 1 and not failures(sweep)


@pytest.mark.parametrize("printed", ["", "step 20"])
def test_a_process_killed_by_sigkill_has_failed(sweep, printed):
    """What it printed last is no reason."""
    runner = Runner(sweep, sweep.groups[:1])
    program = f"print({printed!r}, end='', flush=True)\nimport os"
    start_instead(runner, f"{program}; os.kill(os.getpid(), 9)")
    runner.run()
    assert failures(sweep) == ["exit code -9" + f"; {printed}" * bool(printed)]


def test_a_process_is_not_blamed_for_the_sweeps_signal(sweep):
    """Ctrl-C reaches all processes of a group, and eval.py does not save."""
    runner = Runner(sweep, Shard(0, 1))
    started = start_instead(runner, "raise KeyboardInterrupt")
    start = runner.start

    def start_and_stop(*arguments, **given):
        start(*arguments, **given).wait()
        runner.receive(signal.SIGINT, None)
        return started[-1]

    runner.start = start_and_stop
    with pytest.raises(Stopped, match="SIGINT") as stopped:
        runner.run()
    assert stopped.value.number == signal.SIGINT
    assert len(started) == 1 and not failures(sweep)


# Counts the signals that it gets; like train.py it takes its time to save.
COUNT = """
import os, pathlib, signal, time
got = []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: got.append(number))
pathlib.Path(FOLDER, "ready").touch()
while not got or not pathlib.Path(FOLDER, "sent").exists():
    time.sleep(0.01)
time.sleep(0.2)
pathlib.Path(FOLDER, "got").write_text(" ".join(map(str, map(int, got))))
raise SystemExit(128 + got[0])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("to_group", [False, True])
def test_a_signal_is_forwarded_once_however_often_it_comes(sweep, number, to_group):
    """A process group's signal reaches the child, too; ours then comes second."""
    runner = Runner(sweep, sweep.groups[:1])
    started = start_instead(runner, COUNT)
    folder = sweep.folder(sweep.groups[0])

    def send():
        while not (folder / "ready").exists():
            time.sleep(0.01)
        if to_group:
            os.kill(started[0].pid, number)
        for _ in range(4):
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        (folder / "sent").touch()

    thread = threading.Thread(target=send)
    thread.start()
    with pytest.raises(Stopped, match=signal.Signals(number).name) as stopped:
        runner.run()
    thread.join()
    assert stopped.value.number == number
    got = (folder / "got").read_text().split()
    assert got == [str(int(number))] * (1 + to_group)


def test_an_ignored_hangup_stays_ignored(sweep):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        runner = Runner(sweep, sweep.groups[:1])
        started = start_instead(
            runner, f"import os, signal; os.kill({os.getpid()}, signal.SIGHUP)"
        )
        with contextlib.suppress(Exception):
            runner.run()
        assert started[0].returncode == 0 and runner.signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_restored(sweep):
    before = signal.getsignal(signal.SIGTERM)
    runner = Runner(sweep, sweep.groups[:1])
    start_instead(runner, "assert False")
    runner.run()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("now, is_logged", [("c0ffee", False), ("decade", True)])
def test_a_change_of_the_code_is_logged(sweep, monkeypatch, capsys, now, is_logged):
    monkeypatch.setattr("headcount.sweeps.runner.commit", lambda: now)
    finish(sweep, 0)
    runner = Runner(sweep, sweep.groups[1:2])
    start_instead(runner, "assert False")
    runner.run()
    message = "new trials are of decade, those so far of c0ffee"
    assert (message in capsys.readouterr().err) == is_logged


def test_a_failed_group_is_tried_again_whatever_the_clock_says(sweep):
    """The clock was set back since, or is another machine's."""
    failed = sweep.folder(sweep.groups[0]) / "failed.json"
    failed.write_text(json.dumps({"error": "no memory"}))
    os.utime(failed, (time.time() + 3600,) * 2)
    runner = Runner(sweep, sweep.groups[:1])
    started = start_instead(runner, FINISH.replace("finished", "diverged"))
    runner.run()
    assert started and not failed.exists()
    runner = Runner(sweep, sweep.groups[:1])
    started = start_instead(runner, FINISH)
    failed.write_text(json.dumps({"error": "no memory"}))  # another process's, just now
    runner.run()
    assert not started and failed.exists()


def test_a_damaged_run_json_fails_its_group_only(sweep):
    for group in sweep.groups:
        write_run(sweep.folder(group), status="diverged")
    (sweep.folder(sweep.groups[0]) / "run.json").write_text("{")
    runner = Runner(sweep, Shard(0, 1))
    start_instead(runner, "raise SystemExit('run.json is damaged')")
    runner.run()
    assert failures(sweep) == ["run.json is damaged"]


def test_groups_on_cores_run_at_once_each_on_its_own(tmp_path, sweep):
    available = sorted(os.sched_getaffinity(0))
    found = local_workers(1)
    assert sorted(core for worker in found for core in worker.cores) == available
    assert len(found) == len(available)
    begun, cores = tmp_path / "begun", tmp_path / "cores"
    begun.mkdir(), cores.mkdir()
    at_once = min(2, len(found))  # one waits until another has started too
    program = f"""
import os, time
from pathlib import Path
open({str(begun)!r} + f"/{{os.getpid()}}", "w").close()
while len(list(Path({str(begun)!r}).iterdir())) < {at_once}:
    time.sleep(0.01)
open({str(cores)!r} + f"/{{os.getpid()}}", "w").write(repr(os.sched_getaffinity(0)))
"""
    runner = Runner(sweep, Shard(0, 1), found[:2])
    start_instead(runner, program + FINISH.replace("finished", "diverged"))
    runner.run()
    used = {path.read_text() for path in cores.iterdir()}
    assert used == {repr(worker.cores) for worker in found[:2]}
    assert sorted(os.sched_getaffinity(0)) == available  # our own are as before


@pytest.mark.parametrize("cores", [0, 10_000, 1.5, "two"])
def test_a_group_takes_no_more_cores_than_there_are(cores):
    with pytest.raises(ValueError, match=f"cores must be from 1 to .*got {cores}"):
        local_workers(cores)


def test_there_is_a_worker_per_gpu(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert [worker.environment for worker in local_workers()] == [
        {"CUDA_VISIBLE_DEVICES": "3"},
        {"CUDA_VISIBLE_DEVICES": "5"},
    ]
    with pytest.raises(ValueError, match="--resources=cores"):
        local_workers(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert workers.visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert workers.visible_gpus() == []


def test_an_error_of_the_sweep_stops_what_it_started(sweep):
    runner = Runner(sweep, Shard(0, 1))
    started = start_instead(runner, "import time; time.sleep(60)")

    def show_progress(threads):
        while not started:
            time.sleep(0.01)
        raise BrokenPipeError

    runner.show_progress = show_progress
    try:
        with pytest.raises(BrokenPipeError):
            runner.run()
        assert [child.poll() for child in started] == [-signal.SIGTERM]
    finally:
        runner.is_stopping = True
        started[0].kill()


def finish_instead(runner):
    """Let a runner's processes finish at once, with results; return what it trained."""
    trained = []

    def start(group, splits, **given):
        names = [each.name for each in runner.sweep.groups]
        finish(runner.sweep, names.index(group.name), splits=splits or ())
        if splits is None:
            trained.append(group.name)
        return subprocess.Popen(["true"], **given)

    runner.start = start
    return trained


@pytest.mark.slow
def test_shards_of_planned_looks_take_turns_until_the_last_look(tmp_path, corpus):
    """No arm is ever decided, since all seeds have the same scores."""
    given = options(tmp_path / "s", corpus, seeds=8, looks=[2, 4, 8])
    trained = []
    for turn in range(6):
        runner = Runner(open_sweep(given), Shard(turn % 2, 2))
        own = finish_instead(runner)
        runner.run()
        trained += own
    assert len(trained) == len(set(trained)) == 9
    sweep = open_sweep(given)
    assert len(sweep.groups) == 9
    assert {row["status"] for row in collect(sweep)} == {"done"}


def test_a_shard_waits_for_groups_that_others_work_on_and_for_no_others(
    tmp_path, corpus
):
    given = options(tmp_path / "s", corpus, seeds=4, looks=[2, 4])
    sweep = open_sweep(given)
    runner = Runner(sweep, Shard(0, 2))
    for group in list(runner.left):
        finish(sweep, [g.name for g in sweep.groups].index(group.name))
        runner.left.remove(group)
    (other,) = sweep.shard(1, 2)
    with locked(sweep.folder(other) / ".claim"):
        assert runner.has_groups()
    assert not runner.has_groups()
    finish(sweep, [g.name for g in sweep.groups].index(other.name))
    assert runner.has_groups() and runner.left  # the look is over
