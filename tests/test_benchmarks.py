"""Benchmarks that no other test runs: what they compare, and what they leave out."""

import importlib.util
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import attention, attention_gpu, language_model, training
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
