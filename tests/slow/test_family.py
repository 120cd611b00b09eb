"""Encoder-only and decoder-only models, their settings, and the presets."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.configs.base import get_config
from headcount.configs.presets import PRESETS
from headcount.configs.presets import get_config as preset
from headcount.models.cost import abstract, parameters
from headcount.models.maps import attention_map
from headcount.models.transformer import Transformer, implementations
from headcount.tasks.translation import Translation
from tests.model_cases import ALONE, PACKED, VOCAB, config_of, side

ENCODER = {"num_encoder_layers": 2, "num_decoder_layers": 0}
DECODER = {"num_encoder_layers": 0, "num_decoder_layers": 2}
BERT = {"token_types": 2, "pooler": True, "embedding_norm": True, "activation": "gelu"}


def build_of(settings, positions="learned", norm="post"):
    return partial(Transformer, VOCAB, **config_of(positions, norm) | settings)


def made(settings, *args):
    return build_of(settings, *args)(rngs=nnx.Rngs(0))


@pytest.mark.parametrize("settings, name", [(ENCODER, "source"), (DECODER, "target")])
def test_one_stack_takes_its_side_and_packing_changes_nothing(settings, name):
    model = made(settings | {"output_transform": True, "output_bias": True})
    run = nnx.jit(lambda model, batch, gates: model(batch, head_gates=gates))
    packed = run(model, side(PACKED, name), model.head_gates())
    alone = run(model, side(ALONE, name), None)
    lengths = [3, 5, 4] if name == "source" else [4, 2, 5]
    starts = [(0, 0), (0, lengths[0]), (1, 0)]
    for of, ((row, start), length) in enumerate(zip(starts, lengths, strict=True)):
        np.testing.assert_allclose(
            packed[row, start : start + length], alone[of, :length], atol=2e-5
        )


def influences(model, batch, name, position) -> set[int]:
    """Positions of the first row that the output at a position depends on."""
    graph, params = nnx.split(model)

    def mixed(params):
        hidden = nnx.merge(graph, params).hidden(batch)[0, position]
        return (hidden * jnp.arange(hidden.size) ** 2).sum()

    gradient = np.asarray(jax.jit(jax.grad(mixed))(params)["embedding"][...])
    seen = set(np.flatnonzero(np.abs(gradient).sum(-1)).tolist())
    tokens = batch[name][0].tolist()
    return {tokens.index(token) for token in seen if token in tokens}


def test_an_encoder_sees_all_and_a_decoder_what_is_before():
    batch = side(ALONE, "source")
    assert influences(made(ENCODER), batch, "source", 1) == {0, 1, 2}
    batch = side(ALONE, "target")
    assert influences(made(DECODER), batch, "target", 2) == {0, 1}


@pytest.mark.parametrize("settings, site", [(ENCODER, "encoder"), (DECODER, "decoder")])
def test_gates_maps_and_implementations_are_of_the_stack(settings, site):
    model = made(settings)
    batch = side(PACKED, "source" if site == "encoder" else "target")

    @nnx.jit
    def run(model, gates):
        maps = []

        def observe(seen):
            maps.append(attention_map(seen))

        return model.hidden(batch, head_gates=gates, observe={site: observe}), maps

    gates = model.head_gates()
    assert {name: gate.shape for name, gate in gates.items()} == {site: (2, 4)}
    found = implementations(model, {name: batch[name] for name in batch})
    assert found in ({site: "cpu"}, {site: "blockwise"})  # by the machine
    hidden, maps = run(model, gates)
    T = hidden.shape[1]
    assert [x.shape for x in maps] == [(2, 4, T, T)] * 2
    np.testing.assert_allclose(maps[0][0, :, 0].sum(-1), 1.0, rtol=1e-5)
    gated, _ = run(model, {site: gates[site].at[1, 2].set(0.0)})
    kernel = getattr(model, site)[1].self_attention.merge["kernel"]
    kernel[...] = kernel[...].at[2].set(0.0)
    np.testing.assert_allclose(gated, run(model, gates)[0], atol=1e-6)
    assert not np.allclose(gated, hidden, atol=1e-3)


def test_token_types_and_pooler():
    model = made(ENCODER | BERT)
    batch = side(ALONE, "source")
    zeros = jnp.zeros_like(batch["source"])
    run = nnx.jit(lambda model, **types: model.hidden(batch | types))
    hidden = run(model)
    np.testing.assert_allclose(hidden, run(model, source_types=zeros), atol=1e-6)
    other = run(model, source_types=zeros.at[0].set(1))
    assert not np.allclose(other[0], hidden[0], atol=1e-2)
    np.testing.assert_allclose(other[1:], hidden[1:], atol=1e-6)
    linear = model.pooler.linear
    wanted = np.tanh(hidden[:, 0] @ linear.kernel[...] + linear.bias[...])
    np.testing.assert_allclose(model.pooler(hidden[:, 0]), wanted, atol=1e-6)


def test_an_output_bias_counts_in_logits_and_output():
    model = made({"output_bias": True})
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 16)), jnp.float32)
    bias = jnp.linspace(-3.0, 3.0, VOCAB)
    model.output_bias[...] = bias
    wanted = hidden @ model.embedding[...].T + bias
    np.testing.assert_allclose(model.logits(hidden), wanted, atol=1e-5)
    features, table = model.output(hidden)  # what the loss takes
    np.testing.assert_allclose(features @ table.T, wanted, atol=1e-5)


def test_the_first_input_is_bos():
    model = made({"bos": 35})
    run = nnx.jit(lambda model: model.hidden(PACKED))
    before = run(model)
    model.embedding[...] = model.embedding[...].at[1].add(1.0)  # bos elsewhere
    np.testing.assert_array_equal(run(model), before)
    model.embedding[...] = model.embedding[...].at[35].add(jnp.arange(16.0))
    assert not np.allclose(run(model)[0, 0], before[0, 0], atol=1e-2)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"num_encoder_layers": 0, "num_decoder_layers": 0},
            "at least 0 and one of them above it, got 0 and 0",
        ),
        ({"num_encoder_layers": -1}, "got -1 and 1"),
        (
            {"token_types": 2},
            "model.num_decoder_layers must be 0 with .*types=2",
        ),
        ({"pooler": True}, "must be 0 with model.pooler=True"),
        ({"activation": "swish"}, "model.activation must be one of relu.*'swish'"),
    ],
)
def test_bad_settings_raise_an_error_that_names_the_key(settings, message):
    with pytest.raises(ValueError, match=message):
        made(settings)


def test_translation_without_an_encoder_or_a_decoder_raises_an_error():
    config = get_config()
    Translation(config)
    for stack in ("encoder", "decoder"):
        config = get_config()
        config.model[f"num_{stack}_layers"] = 0
        with pytest.raises(ValueError, match=rf"model\.num_{stack}_layers"):
            Translation(config)


PUBLISHED = {
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
}


def by_hand(vocab, D, F, layers):
    """A translation model's parameters: every kernel, bias and norm."""
    attention, mlp, norm = 4 * (D * D + D), 2 * D * F + D + F, 2 * D
    encoder, decoder = attention + mlp + 2 * norm, 2 * attention + mlp + 3 * norm
    return vocab * D + layers * (encoder + decoder)


EXPECTED = PUBLISHED | {
    "transformer_base": by_hand(37_000, 512, 2048, 6),
    "transformer_big": by_hand(37_000, 1024, 4096, 6),
    "transformer_tiny": by_hand(10_000, 128, 256, 4),
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_its_published_parameter_count(name):
    config = preset(name)
    settings = config.model.to_dict()
    model = abstract(partial(Transformer, config.data.vocab_size, **settings))
    assert parameters(model) == EXPECTED[name]
    if name not in PUBLISHED:
        Translation(config)


def test_presets_change_what_there_is():
    with pytest.raises(ValueError, match=":bert_base, .*:transformer_tiny, not :bert"):
        preset("bert")
    for name in PRESETS:
        assert preset(name).to_dict().keys() == get_config().to_dict().keys()
