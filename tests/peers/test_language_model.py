"""The peers of `benchmarks.language_model` are the models that ours is."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from benchmarks import language_model
from benchmarks import peers_language_model as peers
from headcount.configs import shakespeare
from headcount.models.cost import parameters
from headcount.tasks import make_task


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
    assert peers.ctranslate2_side(theirs, tmp_path)(prompts, 20) == wanted
