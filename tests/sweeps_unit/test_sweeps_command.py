"""sweep.py itself: its flags, exit codes and messages."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from sweep_fakes import ROOT, edit_results, finish, finish_all, only_workdir, options

from headcount.sweeps.settings import open_sweep
from headcount.sweeps.status import print_status
from headcount.sweeps.table import collect
from tests.runs import run


def call(*arguments):
    return run(["sweep.py", *arguments])


@pytest.mark.parametrize(
    "arguments, named",
    [
        pytest.param(
            ["list", "--config=configs/base.py", "--ablation=haeds"],
            "--ablation.*heads",
            marks=pytest.mark.slow,
        ),
        (["report", "--workdir=/nonexistent/s"], "/nonexistent/s holds no sweep"),
        (["status"], "--workdir"),
        (["status", "--workdir=a", "--workdir=b"], "status takes one --workdir"),
        (["report", "--workdir=a", "--workdir"], "--workdir needs the folder"),
        (["report", "--workdir="], "--workdir needs the folder"),
        (["report", "--workdir=x", "--finished=x.csv"], "--finished has no meaning"),
        (["status", "--workdir=x", "--shard=0/2"], "--shard has no meaning"),
        (["run", "--workdir=x", "--nocalibrate"], "--nocalibrate has no meaning"),
        (
            ["report", "--workdir=x", "--resources=cores=1"],
            "--resources has no meaning",
        ),
        (["run", "--workdir=x", "--shard=0/2", "--group=0"], "--group.*--shard"),
        (["run", "--workdir=x", "--shard=2/2"], "--shard must be i/n"),
        pytest.param(["list", "--ablation=heads"], "--config", marks=pytest.mark.slow),
        pytest.param(
            ["run", "--workdir=/nonexistent/s", "--resources=num_gpus=1"],
            "--resources",
            marks=pytest.mark.slow,
        ),
        (
            [
                *("run", "--workdir=/nonexistent/s", "--resources=cores=1"),
                *("--coordinator=h:1", "--num_processes=2", "--process_id=0"),
            ],
            "--resources",
        ),
        (
            ["run", "--workdir=/nonexistent/s", "--launcher=ray", "--coordinator=auto"],
            "--coordinator",
        ),
        pytest.param(
            ["status", "--workdir=/nonexistent/s", "--task_file=no.py"],
            "no.py",
            marks=pytest.mark.slow,
        ),
        (["sweep"], "list, run, status, report"),
    ],
)
def test_bad_flags_are_named_in_one_line_with_exit_code_2(arguments, named):
    found = call(*arguments)
    assert found.returncode == 2 and "Traceback" not in found.stderr
    last = found.stderr.strip().splitlines()[-1]
    assert all(part in last for part in named.split(".*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flag, named",
    [
        ("--group=99", "--group must be the name"),
        ("--finished=pyproject.toml", "is not a complete CSV file"),
        ("--resources=cores=0", "--resources=cores must be"),
        ("--launcher=slurm", "package submitit is needed"),
    ],
)
def test_bad_input_starts_no_sweep(tmp_path, flag, named):
    if "submitit" in named and importlib.util.find_spec("submitit"):
        pytest.skip("submitit is installed")
    workdir = tmp_path / "s"
    new = ("--config=configs/numbers.py", "--ablation=heads", "--seeds=4:8")
    found = call("run", *new, f"--workdir={workdir}", flag)
    assert found.returncode == 2 and named in found.stderr
    assert not workdir.exists()


def test_help_lists_the_verbs_and_every_flag():
    found = call("--help")
    for verb in ("list", "run", "status", "report"):
        assert f"\n    {verb} " in found.stdout
    for flag in ("config", "workdir", "ablation", "seeds", "task_file", "coordinator"):
        assert f"\n  --{flag}: " in found.stdout


FULL_DISK = """
import runpy
import sys
from headcount.sweeps.runner import Runner
def run_process(self, *_):
    raise OSError(28, "No space left on device")
Runner.run_process = run_process
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_full_disk_ends_a_sweep_with_one_sentence(tmp_path, corpus):
    workdir = tmp_path / "s"
    open_sweep(options(workdir, corpus))
    found = subprocess.run(
        [sys.executable, "-c", FULL_DISK, "sweep.py", "run", f"--workdir={workdir}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 2 and "Traceback" not in found.stderr, found.stderr
    last = found.stderr.splitlines()[-1]
    assert "No space left on device" in last and str(workdir) in last


CANCELLED = """
import runpy
import sys
from headcount.sweeps import launchers
launchers.LAUNCHERS["slurm"] = lambda *_: lambda sweep, groups: None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_sweep_whose_jobs_are_cancelled_exits_with_1(tmp_path, corpus):
    """As by scancel, of which submitit says nothing where there is no sacct."""
    workdir = tmp_path / "s"
    open_sweep(options(workdir, corpus))
    flags = ("run", f"--workdir={workdir}", "--launcher=slurm")
    found = subprocess.run(
        [sys.executable, "-c", CANCELLED, "sweep.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1 and "Traceback" not in found.stderr, found.stderr
    assert "6 trials are not done" in found.stderr.splitlines()[-1]


LAST_GROUP_OF_A_LOOK = """
import runpy
import sys
sys.path.append("tests/sweeps_unit")
from sweep_fakes import finish
from headcount.sweeps import launchers
launchers.LAUNCHERS["local"] = lambda *_: lambda sweep, groups: finish(sweep, 2)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_the_last_group_of_a_look_does_not_end_the_sweep(tmp_path, corpus):
    workdir = tmp_path / "s"
    sweep = open_sweep(options(workdir, corpus, seeds=4, looks=[2, 4]))
    for index in (0, 1):
        finish(sweep, index, dev=30.0 + index)
    flags = ("run", f"--workdir={workdir}", "--group=2")
    found = subprocess.run(
        [sys.executable, "-c", LAST_GROUP_OF_A_LOOK, "sweep.py", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "Everything is done" not in found.stdout
    assert "Not done yet: " in found.stdout
    assert f"sweep.py run --workdir={workdir}" in found.stdout


def test_what_is_printed_last_can_be_run_next(tmp_path, corpus, capsys):
    file = tmp_path / "rules.py"
    given = options(tmp_path / "s", corpus, task_file=file)
    sweep = open_sweep(given)
    finish_all(sweep)
    print_status(sweep, collect(sweep))
    last = f"--task_file={file} --workdir={sweep.workdir}"
    assert f"done: python sweep.py report {last}" in capsys.readouterr().out
    damaged = sweep.folder(sweep.groups[0]) / "result-test.json"
    damaged.write_text("[{}]")
    print_status(sweep, collect(sweep))
    printed = capsys.readouterr().out
    assert "Everything is done" not in printed
    assert f"Not done yet: 2 trials. To resume: python sweep.py run {last}" in printed


def test_status_counts_only_the_trials_that_a_growing_sweep_has(
    tmp_path, corpus, capsys
):
    sweep = open_sweep(options(tmp_path / "s", corpus, seeds=8, looks=[2, 8]))
    finish(sweep, 0)  # two seeds of the first of three arms
    print_status(sweep, collect(sweep))
    left = "Not done yet: 4 trials, and any that a search or look adds."
    assert left in capsys.readouterr().out


def test_status_counts_trials_by_status_and_lists_what_diverged(
    tmp_path, corpus, capsys
):
    given = options(tmp_path / "s", corpus)
    sweep = open_sweep(given)
    finish_all(sweep)
    print_status(sweep, collect(sweep))
    printed = capsys.readouterr().out
    assert "Everything is done" in printed and "dev BLEU" in printed
    edit_results(sweep, 1, lambda row: row | {"diverged_at": 7})
    failed = sweep.folder(sweep.groups[2]) / "failed.json"
    failed.write_text(json.dumps({"error": "no memory"}))
    for split in ("val", "test"):
        (failed.parent / f"result-{split}.json").unlink()
    again = open_sweep(only_workdir(given, verb="status"))
    print_status(again, collect(again))
    printed = capsys.readouterr().out
    assert "diverged: K=2, seed 0 at step 7" in printed
    assert "failed: K=1: no memory" in printed
    (line,) = [line for line in printed.splitlines() if "K=2 " in line]
    assert not re.search(r"\d\.\d", line)  # no mean of trials that diverged


@pytest.mark.slow
def test_several_workdirs_are_joined_and_others_named(tmp_path, corpus):
    for name in ("a", "b"):
        given = options(tmp_path / name, corpus)
        finish_all(open_sweep(given))
        open_sweep(only_workdir(given))
    both = [f"--workdir={tmp_path / 'a'}", "--workdir", str(tmp_path / "b")]
    found = call("report", *both, "--examples=1")
    assert found.returncode == 0 and "joined.html" in found.stdout
    missing = call("report", *both, f"--workdir={tmp_path / 'c'}")
    last = missing.stderr.strip().splitlines()[-1]
    assert missing.returncode == 2 and f"{tmp_path / 'c'} holds no sweep" in last
