"""Variants of heads in whole models: groups of trials, recomputation, what they add."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.attention import variants
from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.training.step import (
    init,
    loss_and_gradient,
    make_static,
    train_steps,
)
from headcount.training.trials import hyperparameters
from tests.model_cases import LOSS, PACKED, VOCAB, config_of

MODELS = {
    "differential, residual": {"differential": True, "value_residual": True},
    "latent": {"latent_dim": 6},
    "shared mixture, knocking": {
        "merge": "shared_mixture",
        "mixture_heads": 2,
        "mixture_balance": 0.1,
        "knocking": "mlp",
    },
    "elementwise gates, knocking": {
        "gate": "double_sigmoid",
        "gate_size": "element",
        "knocking": "linear",
    },
    "gated values, clipped": {"gate": "sigmoid", "gate_on": "values", "qk_clip": 0.3},
    "exclusive, sink, QK norm": {
        "exclusive": True,
        "sink": True,
        "qk_norm": True,
        "knocking": "linear",
        "knocking_all": True,
        "gate": "sigmoid",
        "gate_size": "shared",
    },
    "talking heads, gate of 12 features": {
        "talking_heads": True,
        "gate": "double_sigmoid",
        "gate_features": 12,
    },
    "partial rotary, gate without input": {
        "rotary_dim": 2,
        "gate": "double_sigmoid",
        "gate_features": 0,
    },
}


def build_of(layers=1, **attention):
    """Value residuals need a second layer, beside the first, whose values they add.

    Exclusive attention is for self-attention alone.
    """
    layers += "value_residual" in attention
    sites = {"cross_attention": {"exclusive": False}}
    config = config_of("rotary", "pre", attention, **sites)
    config |= {"num_encoder_layers": layers, "num_decoder_layers": layers}
    return partial(Transformer, VOCAB, **config)


def static_of(build, **train):
    config = get_config()
    config.optimizer.schedule, config.model.width = "constant", 16
    config.train.update(train)
    return make_static(abstract(build), config, LOSS)


def trials_of(*seeds, **settings):
    settings = {"model.dropout": 0.0, "optimizer.warmup_steps": 1} | settings
    return hyperparameters(
        flat(get_config().to_dict()), [{"seed": seed} | settings for seed in seeds]
    )


def trained(build, trials, steps=2, **train):
    static, R = static_of(build, **train), len(trials["seed"])
    state = init(trials, static=static, build=build)
    batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (R, steps, *x.shape)), PACKED)
    return train_steps(state, trials, batches, steps, static=static)


def assert_close(one, other, **options):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-5} | options)


@pytest.mark.parametrize("name", MODELS)
def test_a_trial_in_a_group_equals_the_trial_alone(name):
    build = build_of(**MODELS[name])
    group, _ = trained(build, trials_of(0, 1))
    alone, _ = trained(build, trials_of(1))
    second = jax.tree.map(lambda x: x[1:], group.params)
    assert_close(second, alone.params)


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_nothing(name):
    """What layers return beside their output is returned through it, too."""
    build = build_of(**MODELS[name])
    params = nnx.split(build(rngs=nnx.Rngs(0)))[1]
    plain, again = (gradient_of(build, params, remat=r) for r in ("none", "block"))
    assert_close(plain, again, atol=1e-6)


def gradient_of(build, params, **train):
    trial = jax.tree.map(lambda x: x[0], trials_of(0))
    static = static_of(build, **train)
    function = jax.jit(partial(loss_and_gradient, static=static))
    return function(params, trial, PACKED, jax.random.key(0))


def test_balance_steers_the_router_and_not_the_reported_loss():
    settings = MODELS["shared mixture, knocking"]
    build = build_of(layers=2, **settings)
    without = build_of(layers=2, **settings | {"mixture_balance": 0})
    params = nnx.split(build(rngs=nnx.Rngs(0)))[1]
    loss, _, with_balance, _ = gradient_of(build, params)
    plain_loss, weight, plain, _ = gradient_of(without, params)
    np.testing.assert_array_equal(loss, plain_loss)
    assert weight == 11

    graph = nnx.split(build(rngs=nnx.Rngs(0)))[0]

    @jax.jit
    @jax.grad
    def balance(params):
        auxiliary = {}
        nnx.merge(graph, params).hidden(PACKED, auxiliary=auxiliary)
        assert {site: len(own) for site, own in auxiliary.items()} == {
            "encoder": 2,
            "decoder": 2,
            "cross": 2,
        }
        return sum(layer["penalty"] for own in auxiliary.values() for layer in own)

    added = jax.tree.map(jnp.subtract, with_balance, plain)
    assert_close(added, balance(params))
    router = balance(params)["decoder"][0]["self_attention"]["merge"]["router"]
    assert np.abs(router[...]).max() > 1e-4


def test_a_penalty_on_gates_is_its_factor_times_the_heads_expected_to_be_open():
    """Of all sites and layers; the reported loss is without it."""
    settings = {"gate": "hard_concrete", "gate_features": 0}
    build, without = build_of(**settings, gate_penalty=0.1), build_of(**settings)
    params = nnx.split(build(rngs=nnx.Rngs(0)))[1]
    loss, _, with_penalty, _ = gradient_of(build, params)
    plain_loss, _, plain, _ = gradient_of(without, params)
    np.testing.assert_array_equal(loss, plain_loss)
    slope = jax.grad(variants.expected_heads)
    count = 0
    pairs = zip(*map(jax.tree.leaves_with_path, (with_penalty, plain)), strict=True)
    for (path, one), (_, other) in pairs:
        added, name = one - other, jax.tree_util.keystr(path)
        wanted = jnp.zeros_like(added)
        if "output_gate" in name:
            start = jnp.full(added.shape, variants.OPEN / variants.STEP)
            wanted, count = 0.1 * slope(start), count + 1
        np.testing.assert_allclose(added, wanted, rtol=1e-3, atol=1e-6)
    assert count == 3


def test_qk_clip_shrinks_the_heads_whose_logits_were_too_large():
    threshold = 0.5
    (clipped, _), (free, _) = (
        trained(build_of(qk_clip=by), trials_of(0), steps=1) for by in (threshold, 1e9)
    )
    model = build_of(qk_clip=1e9)(rngs=nnx.Rngs(jax.random.key(0)))
    auxiliary = {}
    model.hidden(PACKED, auxiliary=auxiliary)
    for place, site in (("self_attention", "decoder"), ("cross_attention", "cross")):
        for layer, seen in enumerate(auxiliary[site]):
            factor = np.minimum(1, threshold / np.asarray(seen["largest"]))
            assert (factor < 1).any()
            for name in ("query", "key"):
                small, large = (
                    state.params["decoder"][layer][place][name][...][0]
                    for state in (clipped, free)
                )
                wanted = large * np.sqrt(factor)[:, None]
                np.testing.assert_allclose(small, wanted, rtol=1e-4, atol=1e-6)
