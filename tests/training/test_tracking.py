"""train.tracker: which trackers get the rows, and what happens when one fails."""

import builtins

import pytest

from headcount.training import tracking
from headcount.training.metrics import MetricsWriter
from tests.runs import logged


class Recorder:
    """A tracker that remembers its rows."""

    def __init__(self, workdir, step):
        self.step, self.rows, self.closed = step, [], False

    def write(self, step, trial, numbers):
        self.rows.append((step, trial, numbers))

    def close(self):
        self.closed = True


class Broken(Recorder):
    """One that fails at its second row."""

    def write(self, *row):
        super().write(*row)
        if len(self.rows) > 1:
            raise RuntimeError("the network is gone")


def test_a_tracker_that_fails_is_logged_once_and_training_goes_on(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(tracking.TRACKERS, "wandb", Broken)
    monkeypatch.setitem(tracking.TRACKERS, "tensorboard", Recorder)
    writer = MetricsWriter(tmp_path, 7, trackers=["tensorboard", "wandb"])
    for step in (8, 9, 10):
        writer.write(step, 1, loss=float(step), note="no number")
    good, broken = writer.boards
    kept, lost = good.tracker, broken.tracker
    writer.close()
    assert kept.rows == [(s, 1, {"loss": float(s)}) for s in (8, 9, 10)]
    assert kept.step == 7 and kept.closed and lost is None
    assert [row["step"] for row in logged(tmp_path)] == [8, 9, 10]
    said = capsys.readouterr().err
    assert said.count("train.tracker=wandb failed") == 1 and "network is gone" in said


def test_a_tracker_whose_package_is_missing_is_left_out(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments):
        if name == "wandb":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert tracking.start_trackers(["wandb"], tmp_path, 0) == []
    assert "requirements-tracking.txt" in capsys.readouterr().err


def test_names_of_trackers():
    assert tracking.tracker_names("none") == []
    assert tracking.tracker_names("wandb,tensorboard") == ["wandb", "tensorboard"]
    for text in ("", "wandb,", "mlflow"):
        with pytest.raises(ValueError, match="train.tracker must be none, or names"):
            tracking.tracker_names(text)
