"""Variants of attention heads: one function of arrays per published variant.

`models.variants` holds their parameters, and `models.attention` applies them to values,
weights and outputs. docs/reference/variants.md lists formulas, sources, costs and
measured benefits.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from headcount.attention.merge import wide

GATES = {  # activations by name; double_sigmoid is 1 at 0, so gates start open
    "sigmoid": jax.nn.sigmoid,
    "double_sigmoid": lambda x: 2 * jax.nn.sigmoid(x),
}
LEARNED = "hard_concrete"  # gates that a penalty trains to close
# Stretch and temperature of hard concrete gates: Louizos et al. 2018, section 4. Their
# logits are STEP times a parameter: Adam's steps are about as large as the learning
# rate, too small to move a gate from its open start until it closes.
LOW, HIGH, TEMPERATURE, STEP, OPEN = -0.1, 1.1, 2 / 3, 30.0, 3.0
GATE_SIZES = {"head": "N", "element": "N V", "shared": "V"}  # axes of a token's gate


def gate(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "..."],
    activation: str,
    size: str,
    key: Key[Array, ""] | None,
) -> Float[Array, "..."]:
    """Compute gates per token from the first features of its input.

    Qiu et al. 2025 (Gated attention for large language models) use a sigmoid of all
    features, modded-nanogpt of the first 12. A kernel without a feature axis holds the
    gates' logits themselves, the same for all tokens: its shape is N, N V or V.

    Args:
        x: the layer's input.
        kernel: axis of features, then the axes that `GATE_SIZES` gives.
        activation: a name in `GATES`, or `LEARNED`: see `hard_concrete`.
        size: a name in `GATE_SIZES`; "shared" is one gate per element for all heads.
        key: for the noise of `hard_concrete` in training.
    """
    axes = GATE_SIZES[size].split()
    logits = kernel
    if kernel.ndim > len(axes):
        logits = jnp.einsum("BTD,D...->BT...", x[..., : len(kernel)], kernel)
    if activation == LEARNED:
        gates = hard_concrete(logits, key)
    else:
        gates = GATES[activation](logits)
    if size == "head":
        gates = gates[..., None]
    return gates[..., None, :] if size == "shared" else gates


def hard_concrete(
    values: Float[Array, "N"], key: Key[Array, ""] | None = None
) -> Float[Array, "N"]:
    """Compute gates of heads that can be exactly 0 and still have gradients.

    Hard concrete gates (Louizos et al. 2018, 1712.01312), with which Voita et al. 2019
    prune heads: a logistic variable, stretched beyond [0, 1] and clipped to it. Without
    a key, the gates are those of a trained model: deterministic, 0 for pruned heads.

    Args:
        values: logits / `STEP`.
        key: for the noise in training.
    """
    logits = STEP * values.astype(jnp.float32)
    if key is not None:
        noise = jax.random.logistic(key, logits.shape)
        logits = (logits + noise) / TEMPERATURE
    return jnp.clip(LOW + (HIGH - LOW) * jax.nn.sigmoid(logits), 0, 1)


def expected_heads(values: Float[Array, "N"]) -> Float[Array, ""]:
    """Return the expected number of `hard_concrete` gates above 0."""
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    return jax.nn.sigmoid(STEP * values.astype(jnp.float32) - shift).sum()


def exclusive(
    heads: Float[Array, "B T N V"], value: Float[Array, "B T K V"]
) -> Float[Array, "B T N V"]:
    """Remove the component of each head's output along the query token's own value.

    Exclusive self-attention (XSA, 2603.09078): o - (o · v) / ‖v‖² v. A value of zero
    removes nothing. Head n uses the value n // (N // K).
    """
    groups = heads.shape[2] // value.shape[2]
    value = wide(jnp.repeat(value, groups, axis=2) if groups > 1 else value)
    square = jnp.square(value).sum(-1, keepdims=True)
    along = (wide(heads) * value).sum(-1, keepdims=True)
    share = jnp.where(square > 0, along / jnp.where(square > 0, square, 1), 0)
    return (wide(heads) - share * value).astype(heads.dtype)


def paired(value: Float[Array, "B S K V"]) -> Float[Array, "B S K 2*V"]:
    """Concatenate values n and n + K/2, and use the result for both heads.

    For differential attention, where two maps share one value of twice the size.
    """
    joint = jnp.concatenate(jnp.split(value, 2, axis=2), axis=-1)
    return jnp.concatenate([joint, joint], axis=2)


def difference(
    heads: Float[Array, "B T N V"], factor: Float[Array, ""]
) -> Float[Array, "B T M V"]:
    """Subtract factor times head n + N/2 from head n.

    Differential attention (Ye et al. 2024, 2410.05258), where both heads of a pair have
    the same values: (softmax₁ - λ softmax₂) V.
    """
    first, second = jnp.split(heads, 2, axis=2)
    return first - factor.astype(heads.dtype) * second


def initial_difference(layer: int) -> float:
    """Return the initial λ of a layer, counted from 0: Ye et al. 2024, section 2.1."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def knock(
    heads: Float[Array, "B S N V"], kernel: Float[Array, "V V"]
) -> Float[Array, "B S N V"]:
    """Multiply every head by one matrix that all heads share.

    Knocking heads (2510.23052), linear form. The identity gives plain attention.
    """
    return heads @ kernel


def knock_gated(
    heads: Float[Array, "B S N V"],
    up: Float[Array, "V V"],
    gate: Float[Array, "V V"],
    down: Float[Array, "V V"],
) -> Float[Array, "B S N V"]:
    """Apply one gated feed-forward layer that all heads share to every head.

    Knocking heads (2510.23052), MLP form. If up and down are the identity and gate is
    0, it is the identity, because the gate's activation is 2 sigmoid.
    """
    return ((heads @ up) * (2 * jax.nn.sigmoid(heads @ gate))) @ down


def residual_value(
    value: Float[Array, "B S K V"],
    first: Float[Array, "B S K V"],
    share: Float[Array, ""],
) -> Float[Array, "B S K V"]:
    """Mix a layer's values with those of the first layer: (1 - λ) V + λ V₁.

    Zhou et al. 2024 (Value residual learning, 2410.17897), with a learned λ per layer.
    """
    return (1 - share) * value + share * first


def clip_factor(largest: Float[Array, "N"], threshold: float) -> Float[Array, "N"]:
    """Return the factor on each head's logits, min(1, threshold / largest logit).

    QK clip of MuonClip (Kimi K2, 2025).
    """
    return jnp.where(largest > threshold, threshold / jnp.maximum(largest, 1e-9), 1.0)


def balance_loss(
    shares: Float[Array, "B T N"],
    chosen: Bool[Array, "B T N"],
    real: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Compute the load-balancing loss of routed heads, Σ_n f_n P_n.

    MoH (Jin et al. 2024, 2410.11842): f_n is the share of tokens that choose head n,
    P_n the router's mean probability of head n. If tokens choose k of N heads and use
    all evenly, the loss is k / N, its minimum if choices follow the probabilities. Only
    tokens with `real` above 0 count; segment ids can be passed.
    """
    weights = (real > 0).astype(jnp.float32)[..., None]
    total = jnp.maximum(weights.sum(), 1)
    used = (weights * chosen).sum((0, 1)) / total
    return (used * (weights * shares).sum((0, 1)) / total).sum()
