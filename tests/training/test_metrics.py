"""metrics.jsonl, TensorBoard, and the window of averages and throughput."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from headcount.data.examples import ArraySpec
from headcount.runtime.logging import Progress, clock
from headcount.training import metrics
from headcount.training.metrics import MetricsWriter, Window, mean_and_sd


def window_of(rows, source, target):
    """Return a window over batches of so many rows and tokens per row."""
    widths = {"source": source, "target": target}
    return Window({f"{x}_segments": ArraySpec((rows, n)) for x, n in widths.items()})


def step_of(source, target, **changes):
    """Return the metrics of a step, each R; `source` and `target` count tokens."""
    target = np.asarray(target)
    of = {name: np.ones(len(target)) for name in ("loss", "gradient_norm")}
    of |= {"learning_rate": np.ones(len(target)), "weight": target}
    of |= {"updated": np.ones(len(target), bool)}
    of |= {"diverged": np.zeros(len(target), bool)}
    tokens = {"source": np.asarray(source), "target": target}
    return of | {"tokens": tokens} | {k: np.asarray(v) for k, v in changes.items()}


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_after_the_checkpoint_are_dropped_at_a_restart(tmp_path):
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


def test_a_last_row_without_its_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "trial": 0}')  # a full disk took all but the newline
    writer = MetricsWriter(tmp_path, 1)
    writer.write(2, 0, loss=1.0)
    writer.close()
    assert [row["step"] for row in rows_of(path)] == [1, 2]


def test_window_averages_the_loss_over_its_weight():
    window = window_of(2, 8, 10)
    for loss, tokens in ((1.0, 10), (4.0, 20)):
        step = step_of(
            [8, 8],
            [tokens, tokens],
            loss=[loss, np.nan],
            updated=[True, False],
            diverged=[False, loss == 1.0],
        )
        assert window.add(step).tolist() == ([1] if loss == 1.0 else [])
    rows = window.rows()
    assert list(rows) == [0]
    assert rows[0]["loss"] == pytest.approx((10 * 1 + 20 * 4) / 30)
    assert rows[0]["target_fill"] == pytest.approx(30 / 40)
    assert rows[0]["source_fill"] == pytest.approx(16 / 32)
    assert window.metrics == [] and rows[0]["tokens_per_second"] > 0


def test_a_window_without_a_source_has_the_fill_of_its_only_field():
    window = Window(
        {"target_segments": ArraySpec((2, 10)), "target": ArraySpec((2, 10))}
    )
    step = step_of([0], [5])
    window.add(step | {"tokens": {"target": np.array([5])}})
    (row,) = window.rows().values()
    assert row["target_fill"] == 5 / 20 and "source_fill" not in row


def test_each_row_has_the_metrics_of_its_own_trial():
    window = window_of(1, 8, 10)
    step = step_of([6, 7], [4, 5], loss=[1.0, 2.0])
    step |= {"gradient_norm": np.array([0.1, 0.2])}
    step |= {"learning_rate": np.array([0.3, 0.4])}
    window.add(step)
    names = "loss", "source_fill", "target_fill", "gradient_norm", "learning_rate"
    found = [[row[name] for name in names] for row in window.rows().values()]
    assert found == [[1, 6 / 8, 0.4, 0.1, 0.3], [2, 7 / 8, 0.5, 0.2, 0.4]]


def test_the_largest_gradient_norm_is_of_the_updates_since_the_last_row():
    window = window_of(1, 8, 10)
    for norm, updated in ((0.5, True), (2.0, True), (np.inf, False), (1.0, True)):
        step = step_of([6], [4], updated=[updated])
        window.add(step | {"gradient_norm": np.array([norm])})
    (row,) = window.rows().values()
    assert (row["gradient_norm"], row["largest_gradient_norm"]) == (1.0, 2.0)


def test_throughput_excludes_the_steps_before_the_clock_starts():
    window = window_of(1, 4, 4)
    window.add(step_of([1.0], [1000.0]))  # with the compilation
    window.start_clock()
    assert window.throughput({}, None) == {}
    window.add(step_of([1.0], [1.0]))
    window.ideal_seconds = 1e-9
    row = window.rows()[0]
    assert row["tokens_per_second"] / row["steps_per_second"] == pytest.approx(2)
    share = row["flops_utilisation"] / row["steps_per_second"]
    assert share == pytest.approx(1e-9)


def test_throughput_excludes_pauses_and_frozen_trials(monkeypatch):
    now = 0.0
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now))
    window = window_of(2, 8, 10)
    window.start_clock()
    window.ideal_seconds = 1.0
    step = step_of([6, 6], [10, 10], updated=[True, False])
    for waited, computed in ((1.0, 3.0), (0.0, 2.0)):  # the second window is new
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


def test_a_value_that_is_not_finite_becomes_null(tmp_path):
    writer = MetricsWriter(tmp_path, 0)
    writer.write(1, 0, dev_loss=float("nan"), note=None)
    writer.close()
    assert rows_of(tmp_path / "metrics.jsonl")[0]["dev_loss"] is None


def test_mean_and_sd_are_those_of_a_sample():
    assert mean_and_sd("loss", [1.0, 3.0]) == "loss 2.000 ± 1.414"
    assert mean_and_sd("loss", [1.0]) == "loss 1.000" and mean_and_sd("loss", []) == ""


def test_progress_without_a_terminal_prints_rarely(capsys):
    progress = Progress(1000, seconds=3600.0)
    for step in range(1, 1001):
        progress.update(step, "loss 1.0")
    progress.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("step 1000/1000  loss 1.0") and line.endswith("0:00 left")


def test_there_is_no_estimate_before_the_first_step(capsys):
    progress = Progress(10, done=3, seconds=0.0)
    progress.update(3, "compiling")
    assert capsys.readouterr().err == "step 3/10  compiling\n"


@pytest.mark.parametrize(
    "seconds, text", [(5, "0:05"), (65, "1:05"), (3725, "1:02:05"), (float("inf"), "?")]
)
def test_clock_formats_seconds(seconds, text):
    assert clock(seconds) == text
