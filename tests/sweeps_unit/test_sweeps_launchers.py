"""Ray and Slurm without Ray and Slurm: commands, resources, errors."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
from sweep_fakes import options

from headcount.sweeps import launchers
from headcount.sweeps.settings import open_sweep


def test_slurm_jobs_get_absolute_paths(tmp_path, corpus, monkeypatch, capsys):
    submitted = []

    class Executor:
        """Stands for submitit's."""

        def __init__(self, folder, cluster):
            assert folder == tmp_path / "s" / "slurm"

        def update_parameters(self, **parameters):
            pass

        def batch(self):
            return contextlib.nullcontext()

        def submit(self, job):
            submitted.append(job.command)
            assert job.folder == str(tmp_path)  # from which relative paths count
            return SimpleNamespace(job_id=1, result=lambda: 2)

    submitit = SimpleNamespace(AutoExecutor=Executor)
    monkeypatch.setattr(launchers, "optional_package", lambda name: submitit)
    monkeypatch.chdir(tmp_path)
    sweep = open_sweep(options(Path("s"), corpus, task_file=tmp_path / "task.py"))
    launchers.on_slurm(sweep.workdir, "local", [])(sweep, sweep.groups[:1])
    name = sweep.groups[0].name
    assert f"The task of {name} ended with exit code 2." in capsys.readouterr().err
    (command,) = submitted
    assert f"--workdir={tmp_path / 's'}" in command
    assert f"--task_file={tmp_path / 'task.py'}" in command
    assert Path(command[1]).is_absolute() and Path(command[1]).name == "sweep.py"


@pytest.mark.parametrize(
    "launcher, pair, error",
    [
        ("ray", "nmu_gpus=1", ValueError("Invalid option\nkeyword nmu_gpus")),
        ("ray", "num_gpus=one", TypeError("The type of keyword 'num_gpus' must be")),
        ("slurm", "partition=gpu", NameError("Unknown argument 'partition'")),
        ("slurm", "timeout_min=10h", AssertionError()),
    ],
)
def test_resources_that_a_launcher_rejects_are_named(
    tmp_path, monkeypatch, launcher, pair, error
):
    def reject(**parameters):
        assert pair.split("=")[0] in parameters
        raise error

    executor = SimpleNamespace(update_parameters=reject)
    module = SimpleNamespace(  # stands for ray and for submitit
        init=lambda **_: None,
        nodes=lambda: [],
        remote=reject,
        AutoExecutor=lambda *_, **__: executor,
    )
    monkeypatch.setattr(launchers, "optional_package", lambda name: module)
    monkeypatch.setattr(launchers, "default_needs", lambda ray: {"num_cpus": 1})
    address = {"ray": None, "slurm": "local"}[launcher]
    with pytest.raises(ValueError, match=f"--resources={pair}: ") as raised:
        launchers.LAUNCHERS[launcher](tmp_path / "s", address, [pair])
    last = str(raised.value)
    assert last.endswith(" ".join(str(error).split()) or "AssertionError")


@pytest.mark.parametrize("launcher", ["ray", "slurm"])
def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch, launcher):
    package = {"ray": "ray", "slurm": "submitit"}[launcher]
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(ValueError, match=f"package {package} is needed"):
        launchers.LAUNCHERS[launcher](tmp_path / "s", None, [])


def test_a_head_node_without_cores_does_not_count():
    nodes = [{"Alive": True, "Resources": cores} for cores in ({}, {"CPU": 8.0})]
    ray = SimpleNamespace(nodes=lambda: nodes)
    assert launchers.default_needs(ray) == {"num_cpus": 8}


def test_resources_are_python_literals_or_strings():
    assert launchers.parse_resources(["a=1", "b=0.5", "c={'TPU': 4}", "d=gpu"]) == {
        "a": 1,
        "b": 0.5,
        "c": {"TPU": 4},
        "d": "gpu",
    }
    with pytest.raises(ValueError, match="--resources .*'gpu'"):
        launchers.parse_resources(["gpu"])


@pytest.mark.parametrize(
    "error, shown", [(RuntimeError("lost\nat x"), "lost"), (KeyError, "KeyError")]
)
def test_a_task_that_ends_early_is_logged_with_a_reason(capsys, error, shown):
    def result():
        raise error

    launchers.log_end("K=1", result)
    assert capsys.readouterr().err == f"The task of K=1 ended early: {shown}\n"
