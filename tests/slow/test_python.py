"""Train, evaluate and predict from Python, as docs/guides/python.md shows."""

import subprocess
import sys

import numpy as np
import pytest

from headcount.configs import numbers, shakespeare
from headcount.training.loop import Hook
from headcount.training.metrics import read_metrics
from headcount.training.run import load
from tests.conftest import load_script
from tests.runs import ROOT, SMALL, checksums, status

train_config = load_script("train")[0].train_config


def small(corpus):
    config = numbers.get_config()
    with config.unlocked():
        config.update_from_flattened_dict(
            SMALL | corpus | {"data.directory": str(corpus["data.directory"])}
        )
    return config


def test_a_config_trains_with_callbacks_stops_and_resumes(trained, corpus, tmp_path):
    """The end has the bits of train.py's, which was not interrupted."""
    seen = []

    def look(trainer):
        seen.append(trainer.step)
        return trainer.step >= 40

    run = train_config(small(corpus), tmp_path, callbacks=[Hook(20, look)])
    assert seen == [20, 40] and status(tmp_path) == "stopped"
    assert run.step == [40, 40]

    run = train_config(small(corpus), str(tmp_path))
    assert status(tmp_path) == "finished" and run.step == [60, 60]
    assert checksums(tmp_path) == checksums(trained)

    rows = run.evaluate("val", beam_size=1)
    again = load(trained).evaluate("val", beam_size=1)
    assert [row["loss"] for row in rows] == [row["loss"] for row in again]
    assert [row["predictions"] for row in rows] == [row["predictions"] for row in again]
    lines = ["two hundred and six", "twelve"]
    assert run.predict(lines, beam_size=1) == run.task.translate(run, lines)
    with pytest.raises(TypeError, match="no option beam; there are trial, .*beam_size"):
        run.predict(lines, beam=1)
    assert np.isfinite([p for p, _ in run.task.score(run, lines, lines)]).all()


def test_the_gap_is_zero_if_the_training_split_is_the_dev_split(tmp_path):
    config = shakespeare.get_config("short")
    for split in ("train", "val"):
        (tmp_path / f"{split}.txt").write_text("To be, or not to be. " * 30)
    with config.unlocked():
        config.update_from_flattened_dict(
            {"data.name": "text", "data.directory": str(tmp_path)}
            | {"model.num_decoder_layers": 1, "model.dropout": 0.3}
            | {"train.num_steps": 4, "train.eval_train": True, "data.test_share": 0.0}
        )
    train_config(config, tmp_path / "run")
    (row,) = [x for x in read_metrics(tmp_path / "run") if "dev_loss" in x]
    assert row["train_loss"] == row["dev_loss"] and row["generalization_gap"] == 0


def test_a_wrong_config_is_a_value_error(corpus, tmp_path):
    config = small(corpus)
    config.train.tracker = "mlflow"
    with pytest.raises(ValueError, match="train.tracker"):
        train_config(config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_load_prints_nothing(trained):
    """Orbax warns of checkpoints that its own tools would write differently."""
    code = f"from headcount.training.run import load; load({str(trained)!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
