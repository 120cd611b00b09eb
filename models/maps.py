"""A model's full attention maps, for plots, roles and the explorer."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Bool, Float

from headcount import attention
from headcount.attention.reference import alibi
from headcount.models import precision
from headcount.models.attention import (
    Intermediates,
    attention_map,
    norm_weighted_map,
)
from headcount.models.trial_axis import over_trials


@partial(jax.jit, static_argnames="graph")
def attention_maps(
    graph, params, head_gates: dict, batch: dict
) -> dict[str, tuple[Float[Array, "L B N T S"], Float[Array, "L B N T S"]]]:
    """Compute the weights and the norm-weighted shares of every head, by site.

    Args:
        graph, params, head_gates: one trial's model; see `tasks.Run.of`.
        batch: a batch without trial axis; see `models.transformer.Transformer`.
    """
    model = precision.model_of(graph, params)
    found = {site: [] for site in model.sites()}

    def observe(site, layer):
        found[site].append((attention_map(layer), norm_weighted_map(layer)))

    observers = {site: partial(observe, site) for site in found}
    model.hidden(batch, head_gates=head_gates, observe=observers)
    return {
        site: tuple(jnp.stack(maps) for maps in zip(*layers, strict=True))
        for site, layers in found.items()
    }


@partial(jax.jit, static_argnames="graph")
def head_summaries(
    graph, params, head_gates: dict, batch: dict
) -> dict[str, dict[str, Float[Array, "R L N"]]]:
    """Compute statistics per head and trial, by site, for training logs.

    Three are means over the queries of a batch: entropy (nats) and distance (tokens) of
    the weights, and sink (weight on a segment's last key, or first key in the decoder).
    The fourth is the largest logit of the batch. Differential and talking heads have
    only this one, because their maps are not distributions.
    """

    def one(params, head_gates):
        model = precision.model_of(graph, params)
        found = {site: [] for site in model.sites()}

        def observe(site, about, layer):
            segments = batch[f"{about.keys}_segments"]
            end = {"prepend": 0} if about.is_causal else {"append": 0}
            special = (jnp.diff(segments, **end) != 0) & (segments > 0)
            found[site].append(summaries_of(layer, special))

        observers = {
            site: partial(observe, site, about) for site, about in model.sites().items()
        }
        model.hidden(batch, head_gates=head_gates, observe=observers)
        return {
            site: jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
            for site, layers in found.items()
        }

    return over_trials(one)(params, head_gates)


def summaries_of(
    layer: Intermediates, special: Bool[Array, "B S"]
) -> dict[str, Float[Array, "N"]]:
    """Compute the statistics of `head_summaries` for one layer."""
    plain = {name: x for name, x in layer.parameters.items() if name == "sink"}
    weights = attention.attention_weights(
        layer.query, layer.key, **layer.masks, **plain
    )
    seen = weights > 0
    queries = jnp.maximum(seen.any((1, 3)).sum(), 1)  # without padding
    T, S = weights.shape[2:]
    distance = jnp.abs(jnp.arange(S) - jnp.arange(T)[:, None])
    N, H = layer.query.shape[2:]
    key = jnp.repeat(layer.key, N // layer.key.shape[2], axis=2)
    logits = jnp.einsum(
        "BTNH,BSNH->BNTS", layer.query, key, preferred_element_type=jnp.float32
    )
    logits = logits * H**-0.5
    if layer.masks.get("bias") is not None:
        logits = logits + layer.masks["bias"]
    if layer.masks.get("alibi_slopes") is not None:
        logits = logits + alibi(layer.masks["alibi_slopes"], T, S)
    # with a sink, rows sum to less than 1
    shares = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-37)
    largest = {"largest_logit": jnp.where(seen, logits, -jnp.inf).max((0, 2, 3))}
    if layer.difference is not None or "logits_mix" in layer.parameters:
        return largest  # what these heads average values with is no distribution
    return largest | {
        "entropy": -xlogy(shares, shares).sum((0, 2, 3)) / queries,
        "distance": (shares * distance).sum((0, 2, 3)) / queries,
        "sink": (weights * special[:, None, None]).sum((0, 2, 3)) / queries,
    }


def single_example(fields: dict[str, list[int]]) -> dict[str, jax.Array]:
    """Build a batch of one example from the token ids of its fields."""
    batch = {}
    for name, ids in fields.items():
        tokens = jnp.asarray([ids], jnp.int32)
        batch[name] = tokens
        batch[f"{name}_segments"] = jnp.ones_like(tokens)
        batch[f"{name}_positions"] = jnp.arange(tokens.size)[None]
    return batch
