"""Removing heads for real equals gating them, in every rule that allows it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.analysis.heads import open_heads
from headcount.analysis.removal import REMOVABLE_RULES, smaller
from headcount.attention import variants
from headcount.configs.base import get_config
from headcount.models.maps import single_example
from headcount.models.transformer import Transformer
from headcount.tasks import make_task
from headcount.training.checks import check_config
from tests.tasks.untrained import run_of

BATCH = single_example({"source": [4, 9, 8, 2], "target": [7, 5, 4, 6, 2]})
REMOVED = [
    *[("encoder", 0, 1), ("encoder", 0, 3)],
    *[("decoder", 0, n) for n in range(4)],
    *[("decoder", 1, 0), ("cross", 0, 2), ("cross", 1, 0), ("cross", 1, 1)],
]

LEARNED = {"gate": "hard_concrete", "gate_features": 0}


def made(**attention):
    config = get_config()
    config.model.update({"width": 16, "mlp_dim": 16, "num_encoder_layers": 1})
    positions = attention.pop("positions", "sinusoidal")
    config.model.positions = positions
    config.model.attention.update({"num_heads": 4, "value_dim": 5} | attention)
    model = Transformer(20, **config.model.to_dict(), rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: (x + rng.normal(0, 0.3, x.shape))[None], params)
    params = jax.tree.map(jnp.float32, params)
    return run_of(make_task(config), graph, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "attention",
    [
        *({"merge": rule} for rule in REMOVABLE_RULES),
        {"sink": True, "qk_norm": True},
        {"gate": "sigmoid", "gate_size": "element", "value_residual": True},
        {"gate": "double_sigmoid", "gate_features": 0, "qk_clip": 1.0},
        {"gate": "sigmoid", "gate_on": "values", "knocking": "mlp"},
        {"gate": "sigmoid", "gate_size": "shared"},
        {"knocking": "linear", "knocking_all": True},
        {"latent_dim": 6},
        {"differential": True, "num_heads": 8},
        {"latent_dim": 6, "positions": "rotary", "merge": "gated"},
    ],
    ids=str,
)
def test_the_smaller_model_equals_the_gated_one(attention):
    run = made(**attention)
    gates = {"cross": np.ones((1, 2, 4), np.float32)}
    gates["cross"][0, 0, 1] = 0
    run = run._replace(head_gates=gates)  # gone already
    model = nnx.merge(run.graph, run.of(0)[0])
    every = model.head_gates() | {"cross": gates["cross"][0].copy()}
    every = {site: np.array(own) for site, own in every.items()}
    for site, *at in REMOVED:
        every[site][tuple(at)] = 0
    every = jax.tree.map(jnp.asarray, every)
    config, params = smaller(run, 0, REMOVED)
    less = Transformer(20, **config.model.to_dict(), rngs=nnx.Rngs(1))
    nnx.update(less, params)
    heads = {s: x.attentions[0].num_merged_heads for s, x in less.sites().items()}
    shared = attention.get("value_residual", False)  # by layers that keep other heads
    assert heads == {"encoder": 2, "decoder": 3, "cross": 3 if shared else 2}
    wanted = model(BATCH, head_gates=every)
    np.testing.assert_allclose(less(BATCH), wanted, atol=2e-5)
    assert abs(np.asarray(model(BATCH) - wanted)).max() > 0.05

    def size(state):
        return sum(leaf.size for leaf in jax.tree.leaves(state))

    assert size(params) < size(run.params)


@pytest.mark.slow
def test_learned_gates_are_folded_and_those_that_closed_removed():
    run = made(gate="hard_concrete", gate_features=0, merge="scaled")
    values = np.float32([[-9, 9, 0, 1], [0.5, -9, -9, 0]]) / variants.STEP
    model = nnx.merge(run.graph, run.of(0)[0])
    for layer, own in zip(model.decoder, values, strict=True):
        layer.self_attention.output_gate.kernel[...] = jnp.asarray(own)
    params = jax.tree.map(lambda x: x[None], nnx.split(model)[1])
    run = run._replace(params=params)
    others = 3 * 4  # of one encoder layer and two of cross-attention, all but closed
    closed = sum(
        int((np.asarray(attention.learned_gates()) == 0).sum())
        for site in ("encoder", "cross")
        for attention in model.sites()[site].attentions
    )
    assert open_heads(run, 0) == 3 + 2 + others - closed
    config, params = smaller(run, 0, [])
    assert config.model.decoder_attention.gate == "none"
    assert config.model.decoder_attention.num_heads == 3
    check_config(config)  # it can be trained further
    less = Transformer(20, **config.model.to_dict(), rngs=nnx.Rngs(1))
    nnx.update(less, params)
    np.testing.assert_allclose(less(BATCH), model(BATCH), atol=2e-5)
    assert open_heads(made(), 0) is None


def test_a_site_that_gets_no_smaller_is_named(capsys):
    smaller(made(), 0, [("cross", 0, 2), ("decoder", 0, 1), ("decoder", 1, 0)])
    (line,) = capsys.readouterr().err.splitlines()
    assert "cross still has 4 heads" in line


@pytest.mark.parametrize(
    "attention, removed, culprit",
    [
        ({"merge": "mean"}, REMOVED, "'mean'"),
        ({"merge": "mean", **LEARNED}, REMOVED, "'mean'"),
        ({}, [], "No head is to be removed; name some with --heads"),
        ({"num_kv_heads": 2}, REMOVED, "num_kv_heads"),
        ({"talking_heads": True}, REMOVED, "talking_heads"),
        ({"merge": "shared_mixture"}, REMOVED, "'shared_mixture'"),
        ({"positions": "relative"}, REMOVED, "model.positions"),
        ({"positions": "alibi"}, REMOVED, "model.positions"),
        ({}, [("cross", 2, 0)], r"cross\.2\.0.* cross 2 × 4"),
        ({}, [("middle", 0, 0)], r"middle\.0\.0"),
    ],
)
def test_what_cannot_be_removed_is_named(attention, removed, culprit):
    with pytest.raises(ValueError, match=culprit):
        smaller(made(**attention), 0, removed)
