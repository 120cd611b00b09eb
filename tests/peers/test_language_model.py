"""The peers of `benchmarks.language_model` are the models that ours is."""

import json
import sys
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from benchmarks import language_model, launch, torch_gpt
from benchmarks import peers_language_model as peers
from headcount.configs import shakespeare
from headcount.models.cost import parameters
from headcount.tasks import make_task
from headcount.training.optimizer import SCHEDULE_KEYS, learning_rate_at


@pytest.fixture
def config():
    config = shakespeare.get_config("short")
    config.model.width, config.model.mlp_dim = 32, 48
    config.model.num_decoder_layers, config.model.attention.num_heads = 2, 4
    config.model.max_positions = 40
    return config


def test_logits_of_plain_pytorch_equal_ours(config):
    ours = make_task(config).build(rngs=nnx.Rngs(0))
    theirs = peers.Model(config.data.vocab_size, config.model)

    def put(parameter, *parts):
        parts = [np.asarray(part[...]) for part in parts]
        value = np.concatenate([part.reshape(len(part), -1) for part in parts], 1)
        with torch.no_grad():
            parameter.copy_(torch.tensor(value.T))

    def put_norm(module, norm):
        with torch.no_grad():
            module.weight.copy_(torch.tensor(np.asarray(norm.scale[...])))

    with torch.no_grad():
        theirs.embedding.weight.copy_(torch.tensor(np.asarray(ours.embedding[...])))
        table = np.asarray(ours.decoder_positions[...])
        theirs.positions.weight.copy_(torch.tensor(table))
    for block, layer in zip(theirs.blocks, ours.decoder, strict=True):
        own = layer.self_attention
        put(block.query_key_value.weight, own.query, own.key, own.value)
        merge = np.asarray(own.merge["kernel"][...])
        put(block.merge.weight, merge.reshape(-1, merge.shape[-1]))
        put(block.up.weight, layer.mlp.up.kernel)
        put(block.down.weight, layer.mlp.down.kernel)
        put_norm(block.attention_norm, layer.self_norm)
        put_norm(block.mlp_norm, layer.mlp_norm)
    put_norm(theirs.norm, ours.decoder_norm)
    inputs = np.random.default_rng(0).integers(0, config.data.vocab_size, (3, 12))
    positions = np.broadcast_to(np.arange(12), inputs.shape)
    batch = {"target": inputs, "target_inputs": inputs, "target_positions": positions}
    batch["target_segments"] = np.ones_like(inputs)
    logits = ours({name: jnp.asarray(x, jnp.int32) for name, x in batch.items()})
    with torch.no_grad():
        wanted = theirs(torch.tensor(inputs)).numpy()
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)
    assert sum(x.numel() for x in theirs.parameters()) == parameters(ours)


def test_all_sides_continue_prompts_by_the_same_tokens(config, tmp_path):
    theirs = peers.random_gpt2(config)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = language_model.ours(tmp_path, config.model.bos)
    random = np.random.default_rng(0)
    prompts = random.integers(4, config.data.vocab_size, (5, 7)).tolist()
    wanted = peers.transformers_side(theirs)(prompts, 20)
    assert len({tuple(ids) for ids in wanted}) == 5 and max(map(len, wanted)) == 20
    assert ours(prompts, 20) == wanted
    assert peers.ctranslate2_side(tmp_path / "run")(prompts, 20) == wanted


def test_the_pytorch_program_learns_and_writes_its_losses(config, tmp_path):
    config.data.max_length, config.data.batch_tokens = 16, 64
    config.train.num_steps, config.train.eval_every_steps = 60, 20
    config.optimizer.learning_rate, config.optimizer.warmup_steps = 0.01, 5
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    for name in ("train", "dev"):  # the next token follows from the one before
        np.save(tmp_path / f"{name}.npy", np.arange(600) % 7 + 4)
    arguments = ["torch_gpt.py", str(tmp_path), "--our_start"]
    with mock.patch.object(sys, "argv", arguments):
        torch_gpt.main()
    losses = launch.dev_losses(tmp_path / "torch.jsonl")
    assert list(losses) == [20, 40, 60]
    assert losses[60] < losses[20] < 4.5 and losses[60] < 0.5


def test_the_pytorch_program_has_our_learning_rates(config):
    optimizer, steps = config.optimizer, config.train.num_steps
    keys = {key: optimizer[key] for key in SCHEDULE_KEYS} | {"decay_steps": steps}
    for step in (0, 50, 100, 1000, steps - 1):
        ours = learning_rate_at(optimizer.schedule, step, width=1, **keys)
        wanted = torch_gpt.learning_rate(step, optimizer, steps)
        assert float(ours) == pytest.approx(wanted, rel=1e-4)
