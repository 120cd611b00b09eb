"""The table of a sweep: its columns, its statuses, its readers."""

import contextlib
import csv
import json
import sqlite3

import pytest
from sweep_fakes import (
    EVALUATION,
    finish,
    finish_all,
    options,
    read_table,
    statuses,
    write_report,
)

from headcount.sweeps.settings import open_sweep
from headcount.sweeps.table import collect, column_names, logged, throughput
from headcount.tasks.base import Metric


def test_score_columns_are_the_metrics_of_the_task(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    collect(sweep)
    scores = [name for name in read_table(tmp_path / "s")[0] if name[:4] == "dev_"]
    assert scores == [f"dev_{metric.name}" for metric in sweep.task.metrics]
    names = column_names((Metric("f1-macro", "F1"), Metric("error rate", "errors")))
    assert {"dev_f1-macro", "test_error rate"} <= set(names)


def test_the_table_is_made_from_what_is_on_disk(tmp_path, corpus):
    """Rows appear once, however often they are collected."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    collect(sweep)
    assert [row["status"] for row in read_table(tmp_path / "s")] == ["waiting"] * 6
    finish(sweep, 0)
    finish(sweep, 1, splits=("val",))
    failed = sweep.folder(sweep.groups[2]) / "failed.json"
    failed.write_text(json.dumps({"error": "no memory"}))
    for _ in range(2):
        rows = collect(sweep)
    assert read_table(tmp_path / "s") == rows and len(rows) == 6
    assert statuses(sweep) == {"K=4": "done", "K=2": "dev scored", "K=1": "failed"}
    first = rows[0]
    assert first["test_bleu"] == 40 and first["dev_chrf"] == 40 and first["seed"] == 0
    assert first["parameters"] == 9000 and first["commit"] == "c0ffee"
    assert json.loads(first["options"]) == EVALUATION
    assert json.loads(first["signatures"]) == {"bleu": "nrefs:1", "chrf": "nc:6"}
    assert first["tokens_per_second"] == 1000
    assert first["seconds"] == 5  # 20 steps at 2 per second, shared by two trials
    assert rows[-1]["error"] == "no memory"
    with (tmp_path / "s" / "sweep.csv").open() as file:
        assert [r["id"] for r in csv.DictReader(file)] == [r["id"] for r in rows]


def test_throughput_is_weighted_by_time():
    """Rows that took 10 and 15 seconds; one of the steps that compiled has none."""
    rows = [
        {"step": 10, "trial": 0, "steps_per_second": 1.0, "tokens_per_second": 1000.0},
        {"step": 10, "trial": 1, "steps_per_second": 1.0, "tokens_per_second": 1000.0},
        {"step": 40, "trial": 0, "steps_per_second": 2.0, "tokens_per_second": 3000.0},
        {"step": 40, "trial": 0, "dev_bleu": 30.0},
    ]
    assert throughput(rows) == (pytest.approx(2200), pytest.approx(25))
    assert throughput(rows[3:]) == (None, 0)
    assert throughput([rows[-1] | {"steps_per_second": 2.0}]) == (None, 0)


def test_what_was_logged_of_training_is_of_the_time_after_the_warm_up():
    norms = [(50, 9.0, 90.0), (100, 1.0, 8.0), (150, 2.0, 3.0), (200, 3.0, 4.0)]
    rows = [
        {"step": step, "gradient_norm": norm, "largest_gradient_norm": largest}
        for step, norm, largest in norms
    ]
    rows += [
        {"step": step, "train_loss": 1.0 - step / 1000, "generalization_gap": step}
        for step in (100, 200)
    ]
    assert logged(rows, 50) == {
        "gradient_norm": 2.0,
        "largest_gradient_norm": 8.0,
        "train_loss": 0.8,
        "generalization_gap": 200,
    }
    assert logged([{"step": 90, "train_loss": None}], 50) == {}
    early = logged(rows, 60)  # the row of step 100 has steps of the warm-up
    assert early["largest_gradient_norm"] == 4.0 and early["gradient_norm"] == 2.5


def test_a_result_that_was_moved_away_is_not_done(tmp_path, corpus):
    """So that `run` scores its group again."""
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    (sweep.folder(sweep.groups[1]) / "result-val.json").unlink()
    assert statuses(sweep) == {"K=4": "done", "K=2": "trained", "K=1": "done"}
    assert "2 trials are not done yet" in write_report(sweep)


def test_readers_of_the_table_do_not_block_the_sweep(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    collect(sweep)
    path = tmp_path / "s" / "sweep.sqlite"
    journal = tmp_path / "s" / "sweep.sqlite-journal"
    with contextlib.closing(sqlite3.connect(path)) as reader:
        rows = reader.execute("SELECT status FROM trials")
        assert rows.fetchone() == ("waiting",)
        finish(sweep, 0)
        collect(sweep)
        assert rows.fetchall() == [("waiting",)] * 5
    assert [row["status"] for row in read_table(tmp_path / "s")[:2]] == ["done"] * 2
    for file in (path, journal):
        file.write_bytes(b"from a disk that lost some blocks" * 99)
    collect(sweep)
    assert len(read_table(tmp_path / "s")) == 6 and not journal.exists()
