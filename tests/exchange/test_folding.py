"""Merge rules, gates and scales in the output kernel: the same function of heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.attention import variants
from headcount.attention.merge import MERGE_RULES
from headcount.configs.base import get_config
from headcount.exchange import folding
from headcount.exchange.huggingface import named, unnamed
from headcount.models.transformer import Transformer

N, V, D = 4, 3, 12
SIZES = {"N": N, "V": V, "D": D}
LINEAR = ("concat", "scaled", "mean", "weighted")
RNG = np.random.default_rng(0)


def parameters(rule):
    shapes = MERGE_RULES[rule].shapes
    return {
        name: RNG.normal(size=[SIZES[x] for x in letters.split()]).astype(np.float32)
        for name, letters in shapes.items()
    }


@pytest.mark.parametrize("rule", MERGE_RULES)
def test_a_linear_rule_is_concat_with_another_kernel_and_others_are_named(rule):
    params = parameters(rule)
    wide = {name: np.float64(array) for name, array in params.items()}
    if rule not in LINEAR:
        with pytest.raises(ValueError, match=f"here.merge must be concat.*'{rule}'"):
            folding.concat_kernel(rule, wide, N, "here")
        return
    heads, x = RNG.normal(size=(2, 5, N, V)), jnp.zeros((2, 5, D))
    given = {name: jnp.asarray(array) for name, array in params.items()}
    kernel = folding.concat_kernel(rule, wide, N, "here")
    ours = MERGE_RULES[rule].function(jnp.float32(heads), x, **given)
    concat = np.einsum("btnv,nvd->btd", heads, kernel)
    np.testing.assert_allclose(ours, concat, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_folded_model_has_the_same_logits():
    """With gates, a scale and groups, whose heads get copies of keys and values."""
    config = get_config()
    config.model.width, config.model.mlp_dim = 16, 16
    config.model.num_encoder_layers = config.model.num_decoder_layers = 1
    config.model.attention.scale = 0.2
    config.model.decoder_attention.num_kv_heads = 2
    config.model.cross_attention.merge = "mean"
    config.model.encoder_attention.gate = "hard_concrete"
    config.model.encoder_attention.gate_features = 0
    graph, params = nnx.split(
        Transformer(9, **config.model.to_dict(), rngs=nnx.Rngs(0))
    )
    learned = np.float32([-9, 9, 0, 1]) / variants.STEP
    params["encoder"][0]["self_attention"]["output_gate"]["kernel"][...] = learned
    gates = {"cross": np.array([[1.0, 0.0, 0.5, 1.0]])}
    tokens = jnp.asarray(RNG.integers(4, 9, (2, 6)), jnp.int32)
    place = jnp.broadcast_to(jnp.arange(6), (2, 6))
    batch = {}
    for side in ("source", "target"):
        segments = jnp.ones((2, 6), jnp.int32)
        batch |= {side: tokens, f"{side}_segments": segments}
        batch[f"{side}_positions"] = place
    given = jax.tree.map(jnp.asarray, gates)
    ours = nnx.merge(graph, params)(batch, head_gates=given)

    arrays = {name: np.asarray(leaf) for name, leaf in named(params).items()}
    arrays = folding.ungrouped(folding.plain_heads(config, arrays, gates))
    arrays = jax.tree.map(jnp.asarray, arrays)
    plain = config.model.to_dict()
    plain["attention"]["scale"] = None
    plain["decoder_attention"]["num_kv_heads"] = None
    plain["cross_attention"]["merge"] = None
    plain["encoder_attention"]["gate"] = None
    graph, like = nnx.split(Transformer(9, **plain, rngs=nnx.Rngs(0)))
    folded = nnx.merge(graph, unnamed(arrays, like))(batch)
    np.testing.assert_allclose(folded, ours, rtol=1e-4, atol=1e-5)


def test_a_setting_that_a_format_does_not_know_must_have_its_default():
    config = get_config()
    folding.check_plain(config, "X", (), ())
    config.model.encoder_attention.update({"gate": "hard_concrete", "gate_features": 0})
    folding.check_plain(config, "X", (), ())
    config.model.decoder_attention.sink = True
    with pytest.raises(ValueError, match="model.decoder_attention.sink must be False"):
        folding.check_plain(config, "X", (), ())
    config.model.decoder_attention.sink = None
    config.model.output_bias = True
    with pytest.raises(ValueError, match="model.output_bias must be False for X"):
        folding.check_plain(config, "X", (), ())
    folding.check_plain(config, "X", ("output_bias",), ())
