"""Summaries of heads for training logs, against the full maps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.configs.base import get_config
from headcount.models.attention import Attention
from headcount.models.maps import (
    attention_map,
    attention_maps,
    head_summaries,
    norm_weighted_map,
    single_example,
)
from headcount.models.transformer import Transformer

SOURCE, TARGET = [4, 9, 8, 7, 2], [7, 5, 2]


def two_trials(positions: str, settings: dict):
    """Return the graph and the parameters of two small models."""
    config = get_config().model
    config.update({"width": 16, "mlp_dim": 16, "positions": positions})
    config.attention.update(settings)
    graph, params = nnx.split(Transformer(20, **config.to_dict(), rngs=nnx.Rngs(0)))
    return graph, jax.tree.map(lambda x: jnp.stack([x, 3 * x]), params)


SHARED = {"num_kv_heads": 1, "sink": True}


@pytest.mark.parametrize(
    "positions, changes",
    [
        pytest.param("sinusoidal", SHARED, marks=pytest.mark.slow),
        pytest.param("alibi", {}, marks=pytest.mark.slow),
        pytest.param("relative", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_summaries_are_those_of_the_full_maps(positions, changes):
    graph, params = two_trials(positions, {"num_heads": 2} | changes)
    batch = single_example({"source": SOURCE, "target": TARGET})
    wide = {  # padding does not count
        name: jnp.pad(jnp.concatenate([x, 0 * x]), ((0, 0), (0, 3)))
        for name, x in batch.items()
    }
    found = head_summaries(graph, params, {}, wide)
    for trial in (0, 1):
        own = jax.tree.map(lambda x, t=trial: x[t], params)
        maps = attention_maps(graph, own, {}, batch)
        logits = {site: [] for site in maps}

        def keep(site, layer, logits=logits):
            N, H = layer.query.shape[2:]
            key = np.repeat(layer.key, N // layer.key.shape[2], axis=2)
            each = np.einsum("BTNH,BSNH->NTS", layer.query, key) / H**0.5
            each += np.asarray(layer.masks.get("bias", [0.0]))[0]
            slopes = np.asarray(layer.masks.get("alibi_slopes", np.zeros(N)))
            offset = np.arange(each.shape[2]) - np.arange(each.shape[1])[:, None]
            logits[site].append(each - slopes[:, None, None] * abs(offset))

        observe = {site: (lambda x, site=site: keep(site, x)) for site in maps}
        nnx.merge(graph, own).hidden(batch, observe=observe)
        for site, (weights, _) in maps.items():
            whole = np.asarray(weights, float)[:, 0]
            weights = whole / whole.sum(-1, keepdims=True)  # a sink takes the rest
            T, S = weights.shape[2:]
            offset = abs(np.arange(S) - np.arange(T)[:, None])
            logs = np.log(np.where(weights > 0, weights, 1))
            seen = np.array(logits[site])
            seen[weights == 0] = -np.inf
            wanted = {
                "entropy": -(weights * logs).sum(-1).mean(-1),
                "distance": (weights * offset).sum(-1).mean(-1),
                "sink": whole[..., 0 if site == "decoder" else -1].mean(-1),
                "largest_logit": seen.max((2, 3)),
            }
            for name, values in wanted.items():
                np.testing.assert_allclose(
                    found[site][name][trial], values, rtol=1e-4, atol=1e-5
                )


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["differential", "talking_heads"])
def test_heads_without_distributions_have_only_their_largest_logit(variant):
    """Of every softmax: differential attention has two per map."""
    graph, params = two_trials("sinusoidal", {"num_heads": 4, variant: True})
    batch = single_example({"source": SOURCE, "target": TARGET})
    found = head_summaries(graph, params, {}, batch)
    own = jax.tree.map(lambda x: x[1], params)
    wanted = {site: [] for site in found}

    def keep(site, layer):
        logits = np.einsum("BTNH,BSNH->NTS", layer.query, layer.key)
        hidden = np.triu(np.ones(logits.shape[1:], bool), 1) & (site == "decoder")
        H = layer.query.shape[-1]
        wanted[site].append(np.where(hidden, -np.inf, logits / H**0.5).max((1, 2)))

    observe = {site: (lambda x, site=site: keep(site, x)) for site in found}
    nnx.merge(graph, own).hidden(batch, observe=observe)
    for site, statistics in found.items():
        assert statistics.keys() == {"largest_logit"}
        np.testing.assert_allclose(
            statistics["largest_logit"][1], wanted[site], rtol=1e-4
        )


def layer_of(**settings):
    """Return a layer whose norms and gates are not at their start, and its input."""
    module = Attention(
        16, num_heads=4, implementation="reference", **settings, rngs=nnx.Rngs(0)
    )
    rng, (graph, params) = np.random.default_rng(1), nnx.split(module)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), params)
    return nnx.merge(graph, params), jnp.asarray(rng.normal(size=(2, 5, 16)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_kv_heads": 2, "gate": "sigmoid"},
        {
            "merge": "mean",
            "gate": "sigmoid",
            "gate_size": "element",
            "gate_on": "values",
        },
        {"differential": True},
        {"differential": True, "num_kv_heads": 2, "merge": "gated"},
    ],
    ids=str,
)
def test_norm_weighted_maps_are_shares_of_what_keys_add_to_the_output(settings):
    """Per key and head, by hand; their sum is the layer's output."""
    module, x = layer_of(**settings)
    seen = []
    out = module(x, is_causal=True, observe=seen.append)
    (layer,) = seen
    maps, value = attention_map(layer), np.asarray(layer.value)
    if module.difference is not None:
        value = np.concatenate(np.split(value, 2, axis=2), axis=-1)
    N = maps.shape[1]
    value = np.repeat(value, N // value.shape[2], axis=2)
    each = np.einsum("BNTS,BSNV->BTNSV", maps, value)  # of head and key
    if module.difference is not None:
        square = (each.sum(3) ** 2).mean(-1)[..., None, None]
        each *= (1 - module.difference.initial) / np.sqrt(square + 1e-5)
        each *= np.asarray(module.difference.norm.scale)
    if module.output_gate is not None:
        logits = np.asarray(x) @ np.asarray(module.output_gate.kernel)
        each /= 1 + np.exp(-logits)[..., None, None]
    if settings.get("merge") == "gated":
        logits = np.asarray(x) @ np.asarray(module.merge["gate"])
        each /= 1 + np.exp(-logits)[..., None, None]
    if settings.get("merge") == "mean":
        each /= N
    kernel = np.broadcast_to(module.merge["kernel"], (N, each.shape[-1], 16))
    each = np.einsum("BTNSV,NVD->BTNSD", each, kernel)
    total = each.sum((2, 3)) + np.asarray(module.merge_bias)
    np.testing.assert_allclose(total, out, rtol=1e-4, atol=1e-5)
    norms = np.linalg.norm(each, axis=-1).swapaxes(1, 2)
    wanted = norms / norms.sum(-1, keepdims=True)
    np.testing.assert_allclose(norm_weighted_map(layer), wanted, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"exclusive": True},
        {"gate": "sigmoid", "gate_size": "element"},
        {"gate": "double_sigmoid", "gate_size": "shared", "differential": True},
        {"merge": "gated_elementwise"},
    ],
    ids=str,
)
def test_there_are_no_norm_weighted_maps_if_queries_change_what_keys_add(settings):
    module, x = layer_of(**settings)
    seen = []
    module(x, observe=seen.append)
    assert np.isnan(norm_weighted_map(*seen)).all()
