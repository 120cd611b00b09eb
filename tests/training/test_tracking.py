"""train.tracker: which trackers get the rows, and what happens when one fails."""

import builtins
import contextlib
import struct

import pytest
from tensorboardX.proto import event_pb2

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
    (kept,) = writer.boards.values()
    writer.close()
    assert kept.rows == [(s, 1, {"loss": float(s)}) for s in (8, 9, 10)]
    assert kept.step == 7 and kept.closed
    assert [row["step"] for row in logged(tmp_path)] == [8, 9, 10]
    said = capsys.readouterr().err
    assert said.count("train.tracker=wandb failed") == 1 and "network is gone" in said


def events(path):
    """Return the events of a TensorBoard file: length, checksum, event, checksum."""
    content, found = path.read_bytes(), []
    while content:
        (size,) = struct.unpack("Q", content[:8])
        found.append(event_pb2.Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    return found


def test_tensorboard_has_every_number_and_where_the_run_was_resumed(tmp_path):
    board = tracking.TensorBoard(tmp_path, 7)
    board.write(8, 1, {"loss": 2.5, "dev_bleu": 30})
    board.close()
    (path,) = tmp_path.iterdir()
    _, start, *rows = events(path)
    assert start.step == 8 and start.session_log.status == event_pb2.SessionLog.START
    values = [
        (row.step, v.tag, v.simple_value) for row in rows for v in row.summary.value
    ]
    assert values == [(8, "trial_1/loss", 2.5), (8, "trial_1/dev_bleu", 30)]


def test_tensorboard_on_a_full_disk_is_logged_once(tmp_path, capsys):
    board = tracking.TensorBoard(tmp_path, 0)
    records = board.writer._py_recordio_writer
    records._writer.close()
    records._writer = open("/dev/full", "wb")  # noqa: SIM115
    writer = MetricsWriter(tmp_path, 0)
    writer.boards = {"tensorboard": board}
    for step in (1, 2):
        writer.write(step, 0, loss=1.0)
    writer.close()
    said = capsys.readouterr().err
    assert said.count("failed") == 1 and "No space left" in said
    with contextlib.suppress(OSError):
        records._writer.close()


def test_a_tracker_whose_package_is_missing_is_left_out(tmp_path, monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments):
        if name == "wandb":
            raise ImportError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    assert tracking.start_trackers(["wandb"], tmp_path, 0) == {}
    assert "requirements-tracking.txt" in capsys.readouterr().err


def test_names_of_trackers():
    assert tracking.tracker_names("none") == []
    assert tracking.tracker_names("wandb,tensorboard") == ["wandb", "tensorboard"]
    for text in ("", "wandb,", "mlflow"):
        with pytest.raises(ValueError, match="train.tracker must be none, or names"):
            tracking.tracker_names(text)
