"""Weights & Biases, offline: what a run and its resumption record."""

import json
import os
import pty
import struct
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from headcount.sweeps.report import track
from headcount.training import tracking
from headcount.training.metrics import MetricsWriter
from headcount.training.tracking import RECORD
from tests.runs import ROOT

wandb = pytest.importorskip("wandb")


BLOCK, HEADER = 32768, 7  # of the log format of LevelDB, in which wandb writes


def payloads(data: bytes):
    """Yield the entries of a .wandb file, which may be in several parts."""
    place, entry = HEADER, b""  # wandb's own header is as long as one of a part
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + HEADER])
        if place + HEADER + size > len(data):
            return  # still being written
        entry += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole entry, or the last part of one
            yield entry
            entry = b""


def records(folder):
    """The records that the offline runs in a folder wrote, in their order.

    wandb's service closes the file some time after the run has been finished.
    """
    found = []
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        late, entries = time.monotonic() + 60, []
        while not any(entry.HasField("exit") for entry in entries):
            assert time.monotonic() < late, f"{path} has no end: {entries}"
            entries = read_records(path)
            time.sleep(0.1)
        found += entries
    return found


def read_records(path) -> list:
    """The records of one file, as many as are whole."""
    from wandb.proto import wandb_internal_pb2

    read = wandb_internal_pb2.Record.FromString
    return [read(entry) for entry in payloads(path.read_bytes())]


def tables(folder) -> dict:
    """The tables that the offline runs in a folder added, by name; the last of each."""
    found = {}
    for path in sorted(folder.glob("wandb/offline-run-*/files/media/table/*.json")):
        content = json.loads(path.read_text())
        columns, name = content["columns"], path.name.split("_")[0]
        found[name] = [dict(zip(columns, row, strict=True)) for row in content["data"]]
    return found


def artifacts_of(records, kind) -> list:
    """The artifacts of a type; wandb makes some of its own, for tables."""
    found = [record.artifact for record in records if record.HasField("artifact")]
    return [artifact for artifact in found if artifact.type == kind]


def started_run(workdir):
    """Write the files of a run that has started; return its folder."""
    workdir.mkdir(parents=True)
    names = {"task": {"name": "translation"}, "data": {"name": "numbers"}}
    settings = {"model": {"width": 16}, "train": {"num_steps": 100}, **names}
    (workdir / "config.json").write_text(json.dumps(settings))
    (workdir / "trials.json").write_text(json.dumps([{"seed": 3}]))
    facts = {"format_version": 1, "status": "running"}
    (workdir / "run.json").write_text(json.dumps(facts))
    return workdir


def test_a_run_of_a_sweep_is_recorded_offline_and_continued(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    workdir = started_run(tmp_path / "my_sweep" / "groups" / "N=4")
    for step in (0, 10):
        writer = MetricsWriter(workdir, step, trackers=["wandb"])
        writer.write(step + 1, 0, loss=2.5 - step / 10)
        writer.write(step + 1, 0, dev_loss=3.0 + step)
        writer.close()
        time.sleep(1)  # wandb names the folder by the second; a training takes longer
    name = json.loads((workdir / RECORD).read_text())["id"]
    found = records(workdir)
    runs = [record.run for record in found if record.HasField("run")]
    assert {run.run_id for run in runs} == {name} and len(runs) >= 2
    assert {run.run_group for run in runs} == {"my_sweep"}
    assert {run.display_name for run in runs} == {"N=4"}
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["model"] == {"width": 16} and config["trials"] == [{"seed": 3}]
    rows = [
        {
            item.key or "/".join(item.nested_key): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in found
        if record.HasField("history")
    ]
    losses = [
        (row["step"], row["trial_0/loss"]) for row in rows if "trial_0/loss" in row
    ]
    assert losses == [(1, 2.5), (11, 1.5)]
    assert tables(workdir)["evaluations"] == [
        {"step": 1, "trial": 0, "dev_loss": 3.0},
        {"step": 11, "trial": 0, "dev_loss": 13.0},
    ]
    artifacts = artifacts_of(found, "run")
    assert len(artifacts) == 2
    assert {artifact.name for artifact in artifacts} == {f"run-{name}"}
    for artifact in artifacts:
        files = {entry.path for entry in artifact.manifest.contents}
        assert files == {"config.json", "trials.json", "run.json", "metrics.jsonl"}


def finished_sweep(workdir, tracker):
    """A sweep, its rows and its report, as far as tracking looks at them."""
    (workdir / "report").mkdir(parents=True)
    for name in ("report.html", "report.md", "sweep.csv", "report/loss.png"):
        (workdir / name).write_text(name)
    names = ("ablation", "metric", "checkpoint", "test_split", "note")
    settings = dict.fromkeys(names, "x") | {"base": {"train": {"tracker": tracker}}}
    rows = [{"arm": "N=4", "seed": 0, "loss": 1.5}, {"arm": "N=8", "seed": 0}]
    verdicts = [{"arm": "N=8", "verdict": "worse"}]
    sweep = SimpleNamespace(workdir=workdir, settings=settings)
    return sweep, rows, SimpleNamespace(verdicts=verdicts, command="x")


def test_the_report_of_a_sweep_is_recorded_in_the_group_of_its_runs(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    workdir = tmp_path / "my_sweep"
    sweep, rows, report = finished_sweep(workdir, "tensorboard,wandb")
    track(sweep, rows, report)
    found = records(workdir)
    run = next(record.run for record in found if record.HasField("run"))
    assert (run.run_group, run.job_type) == ("my_sweep", "report")
    (artifact,) = artifacts_of(found, "report")
    files = {entry.path for entry in artifact.manifest.contents}
    assert files == {"report.html", "report.md", "sweep.csv", "report/loss.png"}
    assert tables(workdir) == {
        "trials": [rows[0], rows[1] | {"loss": None}],
        "verdicts": report.verdicts,
    }


def test_a_report_is_not_recorded_unasked_nor_stopped_by_an_error(
    tmp_path, monkeypatch, capsys
):
    track(*finished_sweep(tmp_path / "unasked", "tensorboard"))
    assert not (tmp_path / "unasked" / RECORD).exists()

    def fail(*arguments, **options):
        raise RuntimeError("the network is gone")

    monkeypatch.setattr(tracking, "start_wandb", fail)
    track(*finished_sweep(tmp_path / "asked", "wandb"))
    assert "network is gone" in capsys.readouterr().err


WRITE = """
import pathlib, sys
from headcount.training.metrics import MetricsWriter
writer = MetricsWriter(pathlib.Path(sys.argv[1]), 0, trackers=["wandb"])
writer.write(1, 0, loss=2.5)
writer.close()
"""
NO_LOGIN = {"WANDB_API_KEY": ""}
NO_NETWORK = {
    "WANDB_API_KEY": "0" * 40,
    "WANDB_BASE_URL": "http://127.0.0.1:9",  # where nobody listens
    "WANDB_INIT_TIMEOUT": "2",
}


@pytest.mark.parametrize("settings", [NO_LOGIN, NO_NETWORK], ids=["login", "network"])
def test_without_login_or_network_it_warns_and_records_offline(settings, tmp_path):
    """In a terminal, too, where wandb would ask for a key."""
    workdir = started_run(tmp_path / "run")
    environment = os.environ | {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    environment |= settings
    environment.pop("WANDB_MODE", None)
    terminal, end = pty.openpty()
    process = subprocess.run(
        [sys.executable, "-c", WRITE, workdir],
        cwd=ROOT,
        env=environment,
        stdin=end,
        stdout=end,
        stderr=end,
        timeout=120,
    )
    said = os.read(terminal, 65536).decode()
    assert process.returncode == 0, said
    assert "; recording offline." in said
    assert [r for r in records(workdir) if r.HasField("history")]
