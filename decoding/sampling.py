"""Sampling a token from the model's distribution: temperature, top-k, top-p."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

SMALLEST = 1e-37  # lowest temperature; smaller ones underflow in float32


def sample(
    logits: Float[Array, "B vocab"],
    keys: Key[Array, "B"],
    temperature: float,
    top_k: int,
    top_p: float,
) -> Int[Array, "B"]:
    """Draw a token per row from softmax(logits / temperature).

    Args:
        logits: -inf for tokens that must not be drawn.
        keys: one per row.
        temperature: above 0.
        top_k: draw from the k most probable tokens; 0 means all.
        top_p: draw from the smallest set of most probable tokens whose probabilities
            sum to at least top_p (Holtzman et al. 2020).
    """
    # subtracting the maximum avoids inf - inf at low temperatures
    logits = logits - logits.max(-1, keepdims=True)
    logits = logits / max(temperature, SMALLEST)
    if top_k:
        least = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    if top_p < 1:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(ordered, axis=-1)
        mass_before = probabilities.cumsum(-1) - probabilities
        # keep the most probable token at any top_p
        mass_before = mass_before.at[:, 0].set(-1.0)
        least = jnp.where(mass_before < top_p, ordered, jnp.inf).min(-1, keepdims=True)
        logits = jnp.where(logits >= least, logits, -jnp.inf)
    # one uniform number per row, not Gumbel noise per token: random bits are slow
    cumulative = jax.nn.softmax(logits, axis=-1).cumsum(-1)
    draw = partial(jax.random.uniform, dtype=cumulative.dtype)
    uniform = jax.vmap(draw)(keys)[:, None]
    return (cumulative <= uniform * cumulative[:, -1:]).sum(-1, dtype=jnp.int32)
