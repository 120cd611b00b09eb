"""A sweep's files: locks, results that can't be used, damaged records."""

import json
import shutil
import subprocess
import sys

import pytest
from sweep_fakes import (
    edit_results,
    finish,
    finish_all,
    only_workdir,
    options,
    statuses,
    without_digest,
    write_report,
    write_run,
)

from headcount.runtime.files import locked
from headcount.runtime.workdir import with_digest
from headcount.sweeps.settings import open_sweep
from headcount.sweeps.store import last_step
from headcount.sweeps.table import collect


@pytest.mark.parametrize("length", [10, 20_000])
def test_the_last_step_is_found_behind_rows_of_any_length(tmp_path, length):
    rows = [{"step": step, "trial": 0, "heads": "x" * length} for step in (1, 2, 3)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert last_step(tmp_path) == 3
    (tmp_path / "metrics.jsonl").write_text("")
    assert last_step(tmp_path) == 0


def test_a_lock_lasts_as_long_as_any_process_has_it(tmp_path):
    path = tmp_path / "claim"
    with locked(path, wait=False) as mine:
        sleeping = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        child = subprocess.Popen(
            sleeping, stdin=subprocess.PIPE, pass_fds=(mine.fileno(),)
        )
        with locked(path, wait=False) as other:
            assert other is None
    with locked(path, wait=False) as other:  # ours is released, the child has it
        assert other is None
    child.communicate()
    with locked(path, wait=False) as other:
        assert other is not None


@pytest.mark.parametrize(
    "split, change, named",
    [
        (
            "test",
            {"options": {"temperature": 1.0}},
            r"options.beam_size \(in the sweep 5, in the file 'unset'\)",
        ),
        (
            "val",
            {"checkpoint": "last"},
            r"checkpoint \(in the sweep 'best', in the file 'last'\)",
        ),
        ("test", "{", "is damaged"),
        ("val", "{}", "is damaged"),
        ("val", "[]", "is damaged"),
        ("val", "[1, 2]", "is damaged"),
    ],
)
def test_a_result_that_does_not_fit_fails_its_group_and_the_report(
    tmp_path, corpus, split, change, named
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    path = sweep.folder(sweep.groups[1]) / f"result-{split}.json"
    kept = path.read_text()
    if isinstance(change, dict):
        edit_results(sweep, 1, lambda row: row | change, splits=[split])
    else:
        path.write_text(change)
    changed = path.read_text()
    assert statuses(sweep) == {"K=4": "done", "K=2": "failed", "K=1": "done"}
    (error,) = {row["error"] for row in collect(sweep)} - {None}
    assert error.startswith(str(path))
    with pytest.raises(ValueError, match=f"^{path} .*{named}"):
        write_report(sweep)
    assert path.read_text() == changed and not (tmp_path / "s" / "report.md").exists()
    path.write_text(kept)
    write_report(sweep)


@pytest.mark.parametrize(
    "split, metric", [("val", "bleu"), ("test", "chrf"), ("val", "loss")]
)
def test_a_result_without_a_score_is_damaged(tmp_path, corpus, split, metric):
    sweep = open_sweep(options(tmp_path / "s", corpus, metric=metric))
    finish_all(sweep)
    path = sweep.folder(sweep.groups[1]) / f"result-{split}.json"
    rows = json.loads(path.read_text())
    lacking = {key: value for key, value in rows[1].items() if key != metric}
    for row in (lacking, lacking | {metric: None}, lacking | {metric: "high"}):
        path.write_text(json.dumps([rows[0], with_digest(without_digest(row))]))
        assert statuses(sweep)["K=2"] == "failed"
        with pytest.raises(ValueError, match=f"^{path} is damaged .*{metric}"):
            write_report(sweep)


def test_results_from_before_a_metric_existed_are_read(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    for index in range(len(sweep.groups)):
        edit_results(sweep, index, lambda row: {k: row[k] for k in row if k != "chrf"})
    assert {row["test_chrf"] for row in collect(sweep)} == {None}
    assert "| K=2 |" in write_report(sweep)


def test_a_result_changed_by_hand_does_not_count_as_done(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    path = sweep.folder(sweep.groups[1]) / "result-test.json"
    path.write_text(path.read_text().replace('"exact_match": 0.5', '"exact_match": 1'))
    assert statuses(sweep) == {"K=4": "done", "K=2": "failed", "K=1": "done"}
    with pytest.raises(ValueError, match=f"^{path} is damaged .*eval.py wrote it"):
        write_report(sweep)


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda trial: trial["config"]["model"].update(width=64), "id"),
        (lambda trial: trial["config"]["model"].update(width=-4), "model.width"),
        (lambda trial: trial["config"].update(model=None), "model"),
        (lambda trial: trial.update(seed="0"), "seed"),
        (lambda trial: trial.pop("arm"), "arm"),
        (lambda trial: trial.update(more=3), "id"),
    ],
)
def test_an_edited_group_is_named(tmp_path, corpus, edit, named):
    given = options(tmp_path / "s", corpus)
    sweep = open_sweep(given)
    path = sweep.folder(sweep.groups[0]) / "group.json"
    trials = json.loads(path.read_text())
    edit(trials[1])
    path.write_text(json.dumps(trials))
    with pytest.raises(ValueError, match=f"^{path} is damaged .*{named}"):
        open_sweep(only_workdir(given))


def test_only_the_metric_of_the_sweep_must_be_finite(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    edit_results(sweep, 1, lambda row: row | {"loss": None})
    assert statuses(sweep) == dict.fromkeys(["K=4", "K=2", "K=1"], "done")
    edit_results(sweep, 1, lambda row: row | {"bleu": None, "diverged_at": 3})
    assert statuses(sweep)["K=2"] == "diverged"


def test_a_damaged_record_of_a_group_is_named(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    for index in range(3):
        finish(sweep, index, splits=("val", "test") if index < 2 else ())
    run, failed = (
        sweep.folder(sweep.groups[index]) / name
        for index, name in ((1, "run.json"), (2, "failed.json"))
    )
    kept = run.read_text()
    texts = [kept[:20], "{}", "[]", "3", "[" * 10**5]
    texts.append(json.dumps(json.loads(kept) | {"devices": "cpu"}))
    for text in texts:
        run.write_text(text)
        failed.write_text(text)
        assert statuses(sweep) == {"K=4": "done", "K=2": "failed", "K=1": "failed"}
        errors = {row["arm"]: row["error"] for row in collect(sweep)}
        assert errors["K=2"].startswith(f"{run} is damaged")
        assert errors["K=1"].startswith(f"{failed} is damaged")
        with pytest.raises(ValueError, match=f"^{run} is damaged"):
            write_report(sweep)
    run.write_text(kept)
    write_report(sweep)


def test_damaged_metrics_are_skipped_and_missing_predictions_are_an_error(
    tmp_path, corpus
):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    finish_all(sweep)
    folder = sweep.folder(sweep.groups[1])
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'3\n[]\n{"step": "1"}\n{"step": 30}\n\xff\n' + b"[" * 10**5)
    assert {row["steps"] for row in collect(sweep)} == {20}
    write_report(sweep)
    (folder / "test-1.txt").write_text("one\n")
    with pytest.raises(ValueError, match="test-1.txt has 1 lines"):
        write_report(sweep)


def test_a_group_in_which_all_trials_diverged_is_not_failed(tmp_path, corpus):
    sweep = open_sweep(options(tmp_path / "s", corpus))
    write_run(sweep.folder(sweep.groups[1]), status="diverged")
    assert statuses(sweep)["K=2"] == "diverged"


def test_a_copy_of_a_groups_folder_is_named(tmp_path, corpus):
    given = options(tmp_path / "s", corpus)
    sweep = open_sweep(given)
    folder = sweep.folder(sweep.groups[0])
    shutil.copytree(folder, folder.with_name("copy"))
    with pytest.raises(ValueError, match="groups/copy .*hold the same trial"):
        collect(open_sweep(only_workdir(given, verb="status")))
