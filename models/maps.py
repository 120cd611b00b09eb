"""What heads attend to: maps for plots, roles and the explorer, and summaries."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from headcount import attention
from headcount.attention import variants
from headcount.models import precision
from headcount.models.attention import Intermediates
from headcount.models.trial_axis import over_trials


def of_layers(model, batch: dict, head_gates: dict, function: Callable) -> dict:
    """Return a function's results for all layers, stacked, by site.

    Args:
        model: a `models.transformer.Transformer`.
        batch, head_gates: see there.
        function: function of a site and a layer's `Intermediates`.
    """
    results = {site: [] for site in model.sites()}

    def observe(site, layer):
        results[site].append(function(site, layer))

    observers = {site: partial(observe, site) for site in results}
    model.hidden(batch, head_gates=head_gates, observe=observers)
    return {
        site: jax.tree.map(lambda *layers: jnp.stack(layers), *layers)
        for site, layers in results.items()
    }


def attention_map(layer: Intermediates) -> Float[Array, "B N T S"]:
    """Compute every head's attention weights, or differences if differential."""
    weights = attention.attention_weights
    if layer.is_talking:
        weights = attention.talking_heads_weights
    maps = weights(layer.query, layer.key, **layer.masks, **layer.parameters)
    if layer.difference is None:
        return maps
    return variants.difference(maps.swapaxes(1, 2), layer.difference).swapaxes(1, 2)


def norm_weighted_map(layer: Intermediates) -> Float[Array, "B N T S"]:
    """Compute each key's share of the norms ‖α f(x)‖ that a head adds to the output.

    α is the weight, and f(x) is the key's value times the head's merge kernel
    (Kobayashi et al. 2020). Rows sum to 1, so a merge rule's factors on whole heads
    cancel. A token with a large weight but a small value has a small share. Everything
    is NaN if f differs between queries: with exclusive heads, or with gates on the
    elements of the output.
    """
    kernel, weights = layer.arguments["kernel"], attention_map(layer)
    value = layer.value
    if layer.difference is not None:  # one joint value per pair
        value = variants.paired(value)[:, :, : value.shape[2] // 2]
    value = jnp.repeat(value, weights.shape[1] // value.shape[2], axis=2)
    value = value * layer.factors
    kernel = jnp.broadcast_to(kernel, (*value.shape[2:], kernel.shape[-1]))
    added = jnp.einsum("BSNV,NVD->BSND", value, kernel).astype(jnp.float32)
    norms = jnp.linalg.norm(added, axis=-1).transpose(0, 2, 1)[:, :, None]
    shares = jnp.abs(weights) * norms
    total = shares.sum(-1, keepdims=True)
    return shares / jnp.where(total > 0, total, 1.0)


@partial(jax.jit, static_argnames="graph")
def attention_maps(
    graph, params, head_gates: dict, batch: dict
) -> dict[str, tuple[Float[Array, "L B N T S"], Float[Array, "L B N T S"]]]:
    """Compute the weights and the norm-weighted shares of every head, by site.

    Args:
        graph, params, head_gates: one trial's model; see `tasks.Run.of`.
        batch: a batch without trial axis; see `models.transformer.Transformer`.
    """

    def maps_of(site, layer):
        return attention_map(layer), norm_weighted_map(layer)

    return of_layers(precision.model_of(graph, params), batch, head_gates, maps_of)


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
        return of_layers(model, batch, head_gates, summaries_of)

    return over_trials(one)(params, head_gates)


def summaries_of(site: str, layer: Intermediates) -> dict[str, Float[Array, "N"]]:
    """Compute the statistics of `head_summaries` for one layer."""
    query, key, masks = layer.query, layer.key, layer.masks
    means = attention.head_statistics(query, key, **masks)
    count = (masks["query_segment_ids"] > 0).sum(1)  # without padding
    largest = jnp.where(count[:, None] > 0, means.max_logit, -jnp.inf).max(0)
    if not layer.is_distribution:
        return {"largest_logit": largest}
    sink, total = layer.parameters.get("sink"), jnp.maximum(count.sum(), 1)
    special = weight_on_special_token(site, query, key, sink=sink, **masks)
    return {
        "largest_logit": largest,
        "entropy": count @ means.entropy / total,
        "distance": count @ means.distance / total,
        "sink": special.sum((0, 1)) / total,
    }


def weight_on_special_token(
    site: str,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    *,
    key_value_segment_ids: Int[Array, "B S"],
    **arguments,
) -> Float[Array, "B T N"]:
    """Return the attention weight of each query on the special token of its segment.

    This is the last token (EOS) or, in a decoder, the first input token (BOS). Heads
    with nothing to attend to often use it as a sink (Xiao et al. 2024). This takes O(T)
    memory.
    """
    end = {"prepend": 0} if site == "decoder" else {"append": 0}
    special = jnp.diff(key_value_segment_ids, **end) != 0
    special &= key_value_segment_ids > 0
    query, key = jax.lax.stop_gradient((query, key))
    value = jnp.broadcast_to(special[..., None, None], (*key.shape[:3], 1))
    shares = attention.dot_product_attention(
        query,
        key,
        value.astype(key.dtype),
        key_value_segment_ids=key_value_segment_ids,
        **arguments,
    )
    return shares[..., 0].astype(jnp.float32)


def single_example(fields: dict[str, list[int]]) -> dict[str, jax.Array]:
    """Build a batch of one example from the token ids of its fields."""
    batch = {}
    for name, ids in fields.items():
        tokens = np.int32([ids])
        batch[name] = tokens
        batch[f"{name}_segments"] = np.ones_like(tokens)
        batch[f"{name}_positions"] = np.arange(tokens.size, dtype=np.int32)[None]
    return jax.device_put(batch)  # jnp.asarray would compile a program per length
