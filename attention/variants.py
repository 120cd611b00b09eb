"""What is done to heads beside plain attention: one function per published variant.

Functions of arrays alone. `models.variants` holds their parameters, and
`models.attention` applies them in the order of the data: values, weights, outputs.
docs/reference/variants.md lists formulas, sources, costs and what they were worth.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from headcount.attention.merge import wide

GATES = {  # activation by name; the second is 1 at 0, so heads start as without it
    "sigmoid": jax.nn.sigmoid,
    "double_sigmoid": lambda x: 2 * jax.nn.sigmoid(x),
}
LEARNED = "hard_concrete"  # gates that close by themselves under a penalty
# Their stretch and temperature: Louizos et al. 2018, section 4. Their logits are
# multiples of a parameter, as steps of Adam are as large as its rate and a gate has to
# travel far from its start, where it is open, to close.
LOW, HIGH, TEMPERATURE, STEP, OPEN = -0.1, 1.1, 2 / 3, 30.0, 3.0
GATE_SIZES = {"head": "N", "element": "N V", "shared": "V"}  # axes of a token's gate


def gate(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "..."],
    activation: str,
    size: str,
    key: Key[Array, ""] | None = None,
) -> Float[Array, "..."]:
    """Return the gates of every token, from its first `features` elements.

    Qiu et al. 2025 (Gated attention for large language models), sigmoid of all of x;
    modded-nanogpt, of the first 12. A kernel without an axis of features is the gates'
    logits themselves, of all tokens: shapes N, N V or V.

    Args:
        x: the layer's input.
        kernel: (features,) and the axes that `GATE_SIZES` says.
        activation: a name in `GATES`, or `LEARNED`: see `hard_concrete`.
        size: a name in `GATE_SIZES`; "shared" is one gate per element for all heads.
        key: of the noise of `hard_concrete` in training.
    """
    own = GATE_SIZES[size].split()
    logits = kernel
    if kernel.ndim > len(own):
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
    """Return gates of heads that may be 0 and still have gradients.

    Louizos et al. 2018 (1712.01312), by which Voita et al. 2019 prune heads: a logistic
    variable, stretched beyond 0 and 1 and cut there. Without a key the gates are those
    that a trained model uses: the same for all inputs, 0 for heads that are removed.

    Args:
        values: logits / `STEP`.
        key: of the noise.
    """
    logits = STEP * values.astype(jnp.float32)
    if key is not None:
        noise = jax.random.logistic(key, logits.shape)
        logits = (logits + noise) / TEMPERATURE
    return jnp.clip(LOW + (HIGH - LOW) * jax.nn.sigmoid(logits), 0, 1)


def expected_heads(values: Float[Array, "N"]) -> Float[Array, ""]:
    """Return how many gates of `hard_concrete` are expected to be above 0."""
    shift = TEMPERATURE * math.log(-LOW / HIGH)
    return jax.nn.sigmoid(STEP * values.astype(jnp.float32) - shift).sum()


def exclusive(
    heads: Float[Array, "B T N V"], own: Float[Array, "B T K V"]
) -> Float[Array, "B T N V"]:
    """Remove from each head's output its part along the query token's own value.

    Exclusive self-attention (XSA, 2603.09078): o - (o · v) / ‖v‖² v. A value of zero
    removes nothing. Head n has the value n // (N // K).
    """
    groups = heads.shape[2] // own.shape[2]
    value = wide(jnp.repeat(own, groups, axis=2) if groups > 1 else own)
    square = jnp.square(value).sum(-1, keepdims=True)
    along = (wide(heads) * value).sum(-1, keepdims=True)
    share = jnp.where(square > 0, along / jnp.where(square > 0, square, 1), 0)
    return (wide(heads) - share * value).astype(heads.dtype)


def paired(value: Float[Array, "B S K V"]) -> Float[Array, "B S K 2*V"]:
    """Join values n and n + K/2, and give both of them the joint one.

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
    """Return λ at the start, of layers counted from 0: Ye et al. 2024, section 2.1."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def knock(
    heads: Float[Array, "B S N V"], kernel: Float[Array, "V V"]
) -> Float[Array, "B S N V"]:
    """Map every head by one matrix that all share.

    Knocking heads (2510.23052), linear form; the identity is plain attention.
    """
    return heads @ kernel


def knock_gated(
    heads: Float[Array, "B S N V"],
    up: Float[Array, "V V"],
    gate: Float[Array, "V V"],
    down: Float[Array, "V V"],
) -> Float[Array, "B S N V"]:
    """Map every head by one gated feed-forward that all share.

    Knocking heads (2510.23052), MLP form: with up = down = 1 and gate = 0 it is the
    identity, as the gate's activation is 2 sigmoid.
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
    """Return min(1, τ / largest logit): what a head's logits are multiplied by.

    QK clip of MuonClip (Kimi K2, 2025).
    """
    return jnp.where(largest > threshold, threshold / jnp.maximum(largest, 1e-9), 1.0)


def balance_loss(
    shares: Float[Array, "B T N"],
    chosen: Bool[Array, "B T N"],
    real: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Return Σ_n f_n P_n: the load-balancing loss of routed heads.

    MoH (Jin et al. 2024, 2410.11842): f_n is the share of the tokens that choose head
    n, P_n the router's mean probability for it. With k of N heads and even use it is
    k / N, its least value if the choice follows the probabilities. Tokens count where
    `real` is above 0, as in segment ids.
    """
    weights = (real > 0).astype(jnp.float32)[..., None]
    total = jnp.maximum(weights.sum(), 1)
    used = (weights * chosen).sum((0, 1)) / total
    return (used * (weights * shares).sum((0, 1)) / total).sum()
