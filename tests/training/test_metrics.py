"""What a run says while it runs."""

import errno
import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from headcount.runtime.logging import Progress, clock
from headcount.training import metrics
from headcount.training.metrics import MetricsWriter, Window, spread


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_after_the_checkpoint_are_written_anew(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    for step in (1, 2, 3):
        writer.write(step, 0, loss=float(step))
    writer.close()
    path = tmp_path / "metrics.jsonl"
    odd = '3\n{"step": "1"}\n' + "[" * 10**5 + "\n"  # of a disk that lost some
    path.write_text(odd + path.read_text() + '{"step": 4, "los')  # killed while writing
    MetricsWriter(tmp_path, 2).close()
    assert [row["step"] for row in rows_of(path)] == [1, 2]
    assert list(tmp_path.glob("events.*")), "TensorBoard has nothing to show"


def test_a_last_row_without_its_end_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "trial": 0}')  # a full disk took all but the newline
    writer = MetricsWriter(tmp_path, 1)
    writer.write(2, 0, loss=1.0)
    writer.close()
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_window_weighs_the_steps_by_their_tokens():
    window = Window((2, 8, 10))
    for loss, tokens in ((1.0, 10), (4.0, 20)):
        diverged = window.add(
            {
                "loss": np.array([loss, np.nan]),
                "target_tokens": np.array([tokens, tokens]),
                "source_tokens": np.array([8, 8]),
                "gradient_norm": np.ones(2),
                "learning_rate": np.ones(2),
                "updated": np.array([True, False]),
                "diverged": np.array([False, loss == 1.0]),
            }
        )
        assert diverged.tolist() == ([1] if loss == 1.0 else [])
    rows = window.rows()
    assert list(rows) == [0]
    assert rows[0]["loss"] == pytest.approx((10 * 1 + 20 * 4) / 30)
    assert rows[0]["target_fill"] == pytest.approx(30 / 40)
    assert rows[0]["source_fill"] == pytest.approx(16 / 32)
    assert window.metrics == [] and rows[0]["tokens_per_second"] > 0


def test_a_row_is_of_its_own_trial():
    window = Window((1, 8, 10))
    window.add(
        {
            "loss": np.array([1.0, 2.0]),
            "source_tokens": np.array([6, 7]),
            "target_tokens": np.array([4, 5]),
            "gradient_norm": np.array([0.1, 0.2]),
            "learning_rate": np.array([0.3, 0.4]),
            "updated": np.ones(2, bool),
            "diverged": np.zeros(2, bool),
        }
    )
    names = "loss", "source_fill", "target_fill", "gradient_norm", "learning_rate"
    found = [[row[name] for name in names] for row in window.rows().values()]
    assert found == [[1, 6 / 8, 0.4, 0.1, 0.3], [2, 7 / 8, 0.5, 0.2, 0.4]]


def test_the_pace_leaves_out_the_steps_before_the_clock():
    window = Window((1, 4, 4))
    names = ("loss", "source_tokens", "gradient_norm", "learning_rate")
    step = {name: np.ones(1) for name in names} | {
        "updated": np.array([True]),
        "diverged": np.array([False]),
    }
    window.add(step | {"target_tokens": np.array([1000.0])})  # with the compilation
    window.start_clock()
    assert "tokens_per_second" not in window.pace({}, None)
    window.add(step | {"target_tokens": np.array([1.0])})
    window.ideal_seconds = 1e-9
    row = window.rows()[0]
    assert row["tokens_per_second"] / row["steps_per_second"] == pytest.approx(2)
    share = row["flops_utilisation"] / row["steps_per_second"]
    assert share == pytest.approx(1e-9)


def test_the_pace_is_of_updates_alone(monkeypatch):
    """Without pauses, and without the tokens of a trial that is frozen."""
    now = 0.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    window = Window((2, 8, 10))
    window.start_clock()
    window.ideal_seconds = 1.0
    step = {name: np.ones(2) for name in ("loss", "gradient_norm", "learning_rate")}
    step |= {"source_tokens": np.full(2, 6), "target_tokens": np.full(2, 10)}
    step |= {"updated": np.array([True, False]), "diverged": np.zeros(2, bool)}
    for waited, computed in ((1.0, 3.0), (0.0, 2.0)):  # the second window is anew
        with window.waiting():
            now += waited
        now += computed
        window.add(step)
        with window.paused():
            now += 100.0
        row = window.rows()[0]
        seconds = waited + computed
        assert row["steps_per_second"] == pytest.approx(1 / seconds)
        assert row["tokens_per_second"] == pytest.approx((6 + 10) / seconds)
        assert row["input_wait_share"] == pytest.approx(waited / seconds)
        assert row["flops_utilisation"] == pytest.approx(1 / seconds)


def test_what_is_not_finite_is_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, 0, dev_loss=float("nan"), note=None)
    writer.close()
    assert rows_of(tmp_path / "metrics.jsonl")[0]["dev_loss"] is None


def test_spread_is_that_of_a_sample():
    assert spread("loss", [1.0, 3.0]) == "loss 2.000 ± 1.414"
    assert spread("loss", [1.0]) == "loss 1.000" and spread("loss", []) == ""


def test_plain_lines_are_rare(capsys):
    progress = Progress(1000, seconds=3600.0)
    for step in range(1, 1001):
        progress.update(step, "loss 1.0")
    progress.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 1000/1000  loss 1.0")


@pytest.mark.parametrize(
    "seconds, text", [(5, "0:05"), (65, "1:05"), (3725, "1:02:05"), (float("inf"), "?")]
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_nobody_waits_for_a_board_that_a_full_disk_has_ended(tmp_path, monkeypatch):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, 0, loss=1.0)
    events, ended = writer.board.file_writer.event_writer._ev_writer, threading.Event()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for name in ("write_event", "flush"):
        monkeypatch.setattr(events, name, full)
    monkeypatch.setattr(threading, "excepthook", lambda _: ended.set())
    writer.write(2, 0, loss=1.0)
    assert ended.wait(10), "the thread that writes lives"

    def write():
        for step in range(3, 50):
            writer.write(step, 0, loss=1.0)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    writer.close()
    assert len(rows_of(tmp_path / "metrics.jsonl")) == 49
