"""eval.py: which parameters it scores, and what it prints and writes."""

import json
import os
import shutil
import statistics

import pytest

from headcount.tasks import translation
from headcount.training.run import load
from tests.conftest import NO_CROSS, load_script
from tests.runs import arguments, fails, logged, read, run, write_corpus
from tests.tasks import test_language_model
from tests.tasks.untrained import untrained_run


@pytest.mark.slow
def test_best_last_and_average_checkpoints_are_scored(workdir, call):
    """And the scores of each stay beside those of the next."""
    dev = [row["dev_loss"] for row in logged(workdir) if "dev_loss" in row]
    steps = {}
    for which in ("best", "last", "average"):
        args = {"split": "val", "checkpoint": which, "beam_size": 1}
        ran = call("eval.py", workdir=workdir, **args)
        found = read(workdir, "result-val.json")
        kept = [read(workdir, x.name) for x in workdir.glob("result-val-*.json")]
        assert {rows[0]["checkpoint"] for rows in kept} == set(steps)
        assert [(row["trial"], row["seed"]) for row in found] == [(0, 0), (1, 1)]
        assert {row["checkpoint"] for row in found} == {which}
        chrf = [row["chrf"] for row in found]
        for name, of in (("mean of 2", statistics.mean), ("sd", statistics.stdev)):
            (line,) = [x for x in ran.stdout.splitlines() if f"│ {name} " in x]
            assert f" {of(chrf):.2f} " in line
        (steps[which],) = {row["step"] for row in found}
        if which == "average":
            assert "Averaged 5 checkpoints" in ran.stderr
        else:
            assert [row["loss"] for row in found] == pytest.approx(dev, rel=1e-5)
    assert steps == {"best": 60, "last": 60, "average": 60}


def test_scores_are_replaced_by_those_of_the_same_settings_alone(tmp_path, capsys):
    """Others are kept beside them, and the log says where."""
    keep_other = load_script("eval.py")[0].keep_other
    path = tmp_path / "result-val.json"
    row = {"checkpoint": "best", "options": {"beam_size": 5}, "loss": 1.0, "crc32": 7}
    path.write_text(json.dumps([row]))
    keep_other(path, row | {"loss": 2.0})
    assert [each.name for each in tmp_path.iterdir()] == ["result-val.json"]
    other = {"checkpoint": "last"}, {"options": {"beam_size": 1}}, {"crc32": 8}
    for change in other:
        path.write_text(json.dumps([row]))
        keep_other(path, row | change)
        (kept,) = tmp_path.iterdir()
        assert kept != path and json.loads(kept.read_text()) == [row]
        assert str(kept) in capsys.readouterr().err
        kept.unlink()
    path.write_text("damaged")
    keep_other(path, row)
    assert path.read_text() == "damaged"


def test_a_row_says_what_was_scored_and_how(trained, call):
    assert call("eval.py", workdir=trained, split="val", beam_size=2).returncode == 0
    row = read(trained, "result-val.json")[1]
    assert row["split"] == "val" and row["examples"] == 200
    assert row["options"] == {"beam_size": 2, "length_penalty": 0.6}
    assert row["signatures"].keys() == {"bleu", "chrf"}
    assert {"bleu", "chrf", "exact_match", "loss"} < row.keys()
    assert row["diverged_at"] is None and "predictions" not in row


@pytest.mark.slow
def test_several_splits_and_trials_write_a_file_each(trained, call, corpus, tmp_path):
    """And the predictions shown are those of --trial."""
    shutil.copytree(corpus["data.directory"], tmp_path / "corpus")
    for language in ("en", "de"):
        val = tmp_path / "corpus" / f"val.{language}"
        lines = val.read_text().splitlines(keepends=True)
        (tmp_path / "corpus" / f"test.{language}").write_text("".join(lines[:9]))
    options = {"split": "val,test", "checkpoint": "last", "beam_size": 1, "trial": 1}
    options |= {"show": 200, "output": tmp_path / "SPLIT.txt"}
    options["directory"] = tmp_path / "corpus"
    ran = call("eval.py", workdir=trained, **options)
    assert ran.returncode == 0, ran.stderr
    files = {
        (split, trial): (tmp_path / f"{split}-{trial}.txt").read_text().splitlines()
        for split in ("val", "test")
        for trial in (0, 1)
    }
    assert {at: len(lines) for at, lines in files.items()} == {
        ("val", 0): 200,
        ("val", 1): 200,
        ("test", 0): 9,
        ("test", 1): 9,
    }
    mark = "prediction  "
    shown = [line for line in ran.stdout.split("\n") if line.startswith(mark)]
    wanted = files["val", 1] + files["test", 1]
    assert [line.removeprefix(mark) for line in shown] == wanted
    assert files["val", 0] != files["val", 1]
    assert read(trained, "result-test.json")[0]["examples"] == 9


@pytest.mark.slow
def test_a_trial_is_scored_without_the_heads_that_its_gates_remove(workdir, tmp_path):
    """Without cross-attention, nothing of the source is left in a translation."""
    trials = [{"seed": 0}, {"seed": 1, **NO_CROSS}]
    (workdir / "trials.json").write_text(json.dumps(trials))
    out = {"output": tmp_path / "out.txt"}
    ran = run(arguments("eval.py", workdir=workdir, split="val", beam_size=1, **out))
    assert ran.returncode == 0, ran.stderr
    whole, gated = ((tmp_path / f"out-{n}.txt").read_text().splitlines() for n in "01")
    assert all(max(gated, key=len).startswith(line) for line in gated)
    assert not all(max(whole, key=len).startswith(line) for line in whole)


def test_n_best_lists_are_written_and_the_best_are_scored(
    workdir, call, tmp_path, monkeypatch
):
    """By a decoder whose best is the reference."""
    target = load(workdir).task.load("val").fields["target"]

    def translations(run, sources, trials, *, n_best, **options):
        assert n_best == 2
        lists = [[(ids[:-1].tolist(), -0.25), ([], -1.5)] for ids in target]
        return dict.fromkeys(trials, lists)

    monkeypatch.setattr(translation, "translations", translations)
    options = {"n_best": 2, "output": tmp_path / "SPLIT.txt", "show": 1000}
    ran = call("eval.py", workdir=workdir, split="val", **options)
    assert ran.returncode == 0, ran.stderr
    found = read(workdir, "result-val.json")
    assert [row["exact_match"] for row in found] == [1, 1]
    lines = (tmp_path / "val-1.txt").read_text().splitlines()
    references = load(workdir).task.read("val")["target"]
    assert lines[::2] == [f"{i} ||| {x} ||| -0.2500" for i, x in enumerate(references)]
    assert lines[1::2] == [f"{i} |||  ||| -1.5000" for i in range(len(references))]
    first, second, *_ = ran.stdout.split("\nsource ")[1:]
    assert f"prediction  0 ||| {references[0]} ||| -0.2500\n0 |||" in first
    assert f"prediction  1 ||| {references[1]} ||| -0.2500\n1 |||" in second


@pytest.mark.parametrize(
    "name",
    ["config.json", "run.json", "result-val.json", "checkpoints/x", "wandb.json"],
)
def test_output_may_not_be_a_file_of_the_run(name, trained, call):
    path = trained / name
    before = path.read_bytes() if path.exists() else None
    ran = call("eval.py", workdir=trained, split="val", output=path)
    fails(ran, f"--output={path}", "a file of the run")
    assert (path.read_bytes() if path.exists() else None) == before


def test_scores_that_can_not_be_written_fail_before_scoring(workdir, call, monkeypatch):
    (workdir / "result-val.json").mkdir()
    monkeypatch.setattr(load_script("eval.py")[0], "evaluate", None)
    ran = call("eval.py", workdir=workdir, split="val")
    fails(ran, f"--workdir={workdir}", "result-val.json")


@pytest.mark.parametrize("name", ["pipe", "link", "", "/"])
def test_output_is_a_regular_file(name, trained, call, tmp_path):
    """A device would be replaced by a file, such as /dev/null by root."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    path = tmp_path / name if name.isalpha() else name
    fails(call("eval.py", workdir=trained, split="val", output=path), "--output")
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("flag, value", [("output", "o.txt"), ("show", 3)])
def test_flags_about_predictions_fail_for_a_task_without_any(
    call, monkeypatch, tmp_path, flag, value
):
    for split in ("train", "val"):
        text = "\n\n".join(test_language_model.TRAIN)
        (tmp_path / f"{split}.txt").write_text(text)
    untrained = untrained_run(test_language_model.make_task(tmp_path), num_trials=1)
    monkeypatch.setattr(load_script("eval.py")[0], "load", lambda *_: untrained)
    ran = call("eval.py", workdir=tmp_path, split="val", **{flag: value})
    fails(ran, f"--{flag}={value}: evaluating a language_model makes no predictions")


def test_several_splits_need_their_name_in_the_files_name(call):
    ran = call("eval.py", workdir="x", split="val,test", output="SPLITS/out.txt")
    fails(ran, "--output=SPLITS/out.txt is one file for 2 splits")


def test_output_that_cannot_be_written_fails_before_a_run_is_read(call, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    ran = call("eval.py", workdir="x", split="val", output="o.txt")
    fails(ran, "--output=o.txt: o.txt can't be written")


def test_every_split_is_checked_before_the_first_is_decoded(workdir, call, monkeypatch):
    """References as published, too, which only scores need."""
    ran = call("eval.py", workdir=workdir, split="val,tset")
    fails(ran, "tset", "It has the splits train, val.")
    assert not ran.stdout

    def no_references(task, split):
        raise FileNotFoundError("no references")

    monkeypatch.setattr(translation.Translation, "published_references", no_references)
    fails(call("eval.py", workdir=workdir, split="val"), "no references")
    assert not (workdir / "result-val.json").exists()


@pytest.mark.slow
def test_out_of_memory_says_what_needs_less(trained):
    ran = run(arguments("eval.py", workdir=trained, split="val", beam_size=2**16))
    fails(ran, "Out of memory", "--beam_size")


def test_a_run_without_a_checkpoint_or_an_evaluation(trained, corpus, tmp_path):
    unscored, empty = tmp_path / "unscored", tmp_path / "empty"
    shutil.copytree(trained, unscored, ignore=shutil.ignore_patterns("60"))
    shutil.copytree(trained, empty, ignore=shutil.ignore_patterns("[0-9]*"))
    fails(run(arguments("eval.py", workdir=unscored, split="val")), "--checkpoint=last")
    fails(run(arguments("eval.py", workdir=empty, split="val")), empty / "checkpoints")


@pytest.mark.slow
def test_directory_replaces_that_of_the_run(trained, call, tmp_path):
    folder = write_corpus(tmp_path / "corpus", ["one", "two"], ["eins", "zwei"])
    options = {"directory": folder["data.directory"], "beam_size": 1}
    assert call("eval.py", workdir=trained, split="val", **options).returncode == 0
    assert [row["examples"] for row in read(trained, "result-val.json")] == [2, 2]
