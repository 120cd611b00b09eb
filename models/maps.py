"""Whole maps of attention of a model, for plots, roles and the explorer."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from headcount.models import precision
from headcount.models.attention import attention_map, norm_weighted_map


@partial(jax.jit, static_argnames="graph")
def attention_maps(
    graph, params, head_gates: dict, batch: dict
) -> dict[str, tuple[Float[Array, "L B N T S"], Float[Array, "L B N T S"]]]:
    """Return the weights and the norm-weighted shares of every head, by site.

    Args:
        graph, params, head_gates: of one trial; see `tasks.Run.of`.
        batch: without a trial axis; see `models.transformer.Transformer`.
    """
    model = precision.merge(graph, params)
    found = {site: [] for site in model.sites()}

    def observe(site, layer):
        found[site].append((attention_map(layer), norm_weighted_map(layer)))

    observers = {site: partial(observe, site) for site in found}
    model.hidden(batch, head_gates=head_gates, observe=observers)
    return {
        site: tuple(jnp.stack(maps) for maps in zip(*layers, strict=True))
        for site, layers in found.items()
    }


def single_example(fields: dict[str, list[int]]) -> dict[str, jax.Array]:
    """Return a batch of one example from the token ids of its fields."""
    batch = {}
    for name, ids in fields.items():
        tokens = jnp.asarray([ids], jnp.int32)
        batch[name] = tokens
        batch[f"{name}_segments"] = jnp.ones_like(tokens)
        batch[f"{name}_positions"] = jnp.arange(tokens.size)[None]
    return batch
