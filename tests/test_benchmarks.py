"""Benchmarks that no other test runs: what they compare, and what they leave out."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import attention, attention_gpu, language_model, training, verdict
from headcount.analysis.sequential import Looks
from headcount.configs import shakespeare
from headcount.models import cost
from headcount.tasks import make_task


def test_a_peer_that_refuses_has_an_empty_cell(monkeypatch):
    monkeypatch.setattr(attention_gpu, "SECONDS", 0)
    monkeypatch.setattr(attention_gpu, "ROUNDS", 1)
    arrays = attention_gpu.inputs(8, 512, 1024, tokens=8)
    lines = list(attention_gpu.rows("V 1024", arrays, ("blockwise", "xla")))
    assert [line.split(" | ")[1] for line in lines] == ["forward", "backward"]
    for line in lines:
        assert float(line.split(" | ")[2]) > 0
        assert line.endswith(" |  |")


def test_a_gpu_is_not_asked_for_float32_by_cudnn(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    calls = attention.contenders("B1xT4xN1xH4", True, np.random.default_rng(0))
    assert set(calls) == {"ours", "jax.nn", "einsum"}


def test_a_token_of_a_language_model_attends_to_half_of_its_window():
    """All else is what the model's own products cost, which have no mask."""
    config = shakespeare.get_config("short")
    task, model = make_task(config), config.model
    counted = cost.update_flops(cost.abstract(task.build), task.spec())
    T = config.data.max_length
    later = 3 * model.num_decoder_layers * 4 * model.width * (T - 1) / 2
    found = language_model.flop_per_token(config)
    assert found + later == counted / config.data.batch_tokens


def test_settings_that_torch_lacks_are_refused(monkeypatch):
    """Unless it is not there; what is shared stands in the peers' module."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    shared = ["model.width=32", "model.attention.num_heads=2"]
    assert training.contestants_of(shared) == ["ours", "torch", "torch.compile"]
    for key in ("model.attention.merge", "model.positions", "model.norm_epsilon"):
        with pytest.raises(SystemExit, match=f"--set {key}: the torch peers lack it"):
            training.contestants_of([*shared, f"{key}=x"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert training.contestants_of(["model.attention.merge=mean"]) == ["ours"]
    peers = Path(training.__file__).with_name("peers_training.py").read_text()
    ours = "data.name", "data.source", "data.target", "model.attention.implementation"
    for key in set(training.SHARED) - set(ours):
        assert f".{key.split('.')[-1]}" in peers, key


def test_false_verdicts_and_training_runs_are_counted_by_hand():
    """Three arms: a true gain, none, and one within the margin; four sweeps."""
    truth = np.array([-0.02, 0.0, 0.001])
    B, W, E, U = verdict.BETTER, verdict.WORSE, verdict.EQUIVALENT, verdict.UNDECIDED
    kinds = np.array([[B, W, E, U], [U, U, B, E], [E, E, E, U]])
    # the second sweep has a wrong sign; the third is equivalent beyond the margin, and
    # has a false gain
    found = verdict.outcome(kinds, np.array([4, 8, 8, 4]), truth, margin=0.005)
    assert found == verdict.Outcome(trainings=6.0, decided=8 / 12, false=2 / 4)
    # without a margin, only signs count
    assert verdict.outcome(kinds, np.ones(4), truth, None).false == 2 / 4
    each = [SimpleNamespace(seeds=np.array(seeds)) for seeds in ([4, 8], [6, 4])]
    # the baseline is trained with as many seeds as the arm that needs most
    assert verdict.trainings_of(each).tolist() == [4 + 6 + 6, 8 + 4 + 8]


def test_a_replay_stops_arms_that_are_clearly_decided():
    rng = np.random.default_rng(0)
    baseline = rng.normal(1.5, 0.01, 16)
    noise = rng.normal(0, 0.0005, (2, 16))
    worse, equal = baseline + 0.05 + noise[0], baseline + noise[1]
    looks = Looks((4, 8, 16), 0.005, 2)
    count, is_same = verdict.replay(np.array([worse, baseline, equal]), 1, looks)
    assert is_same and count == 3 * 4


def test_scores_are_read_over_common_seeds(tmp_path):
    path = tmp_path / "sweep.csv"
    rows = ["arm,seed,stage,status,is_baseline,test_loss"]
    rows += [f"a,{seed},report,done,0,{seed}.5" for seed in (10, 9, 8)]
    rows += [f"b,{seed},report,done,1,{seed}.25" for seed in (9, 10)]
    rows += ["b,8,report,failed,1,", "b,1,search,done,1,7.0"]
    path.write_text("\n".join(rows) + "\n")
    scores, baseline = verdict.read_scores(path, "test_loss")
    assert baseline == 1 and scores.tolist() == [[9.5, 10.5], [9.25, 10.25]]
    assert verdict.read_scores(path, "test_bleu")[0].size == 0
