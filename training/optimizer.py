"""Optimizers and learning-rate schedules.

Hyperparameters may be traced, so that trials of one program can have different ones.
"""

import math
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, scale_by_muon


def inverse_sqrt(step, *, warmup_steps, **_):
    """Linear warm-up, then 1 / sqrt(step) (fairseq)."""
    return jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / step))


def noam(step, *, warmup_steps, width, **_):
    """Return `inverse_sqrt` times (width · warmup_steps)^-0.5 (Vaswani et al. 2017)."""
    peak = (width * warmup_steps) ** -0.5
    return peak * inverse_sqrt(step, warmup_steps=warmup_steps)


def constant(step, *, warmup_steps, **_):
    """Linear warm-up, then constant."""
    return jnp.minimum(step / warmup_steps, 1.0)


def cosine(step, *, warmup_steps, decay_steps, final_share, **_):
    """Linear warm-up, then half a cosine down to final_share."""
    progress = (step - warmup_steps) / jnp.maximum(decay_steps - warmup_steps, 1)
    curve = 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(progress, 0, 1)))
    decayed = final_share + (1 - final_share) * curve
    return jnp.minimum(step / warmup_steps, decayed)


def linear(step, *, warmup_steps, decay_steps, final_share, **_):
    """Linear warm-up, then linear decay to final_share."""
    progress = (step - warmup_steps) / jnp.maximum(decay_steps - warmup_steps, 1)
    decayed = 1 - (1 - final_share) * jnp.clip(progress, 0, 1)
    return jnp.minimum(step / warmup_steps, decayed)


def warmup_stable_decay(
    step, *, warmup_steps, decay_steps, final_share, decay_share, **_
):
    """Linear warm-up, constant, then linear decay over the last decay_share."""
    length = decay_share * decay_steps
    progress = (step - (decay_steps - length)) / jnp.maximum(length, 1)
    decayed = 1 - (1 - final_share) * jnp.clip(progress, 0, 1)
    return jnp.minimum(step / warmup_steps, decayed)


SCHEDULES = {  # the learning rate as a share of its peak, at update `step` from 1 on
    "inverse_sqrt": inverse_sqrt,
    "noam": noam,
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "warmup_stable_decay": warmup_stable_decay,
}
SCHEDULE_KEYS = (
    *("learning_rate", "warmup_steps"),
    *("decay_steps", "final_share", "decay_share"),
)
NEED_DECAY_STEPS = ("cosine", "linear", "warmup_stable_decay")


def learning_rate_at(schedule, step, learning_rate, warmup_steps, width, **decay):
    """Return the learning rate of update number `step`, from 0 on."""
    warmup_steps = jnp.maximum(warmup_steps, 1)
    share = SCHEDULES[schedule](
        step + 1.0, warmup_steps=warmup_steps, width=width, **decay
    )
    return learning_rate * share


MUON_RMS = 0.2  # of Muon's updates: about that of Adam's (Liu et al. 2025)


def by_parameter(function: Callable, params):
    """Return a tree like a model's parameters, with a function's value for each.

    Args:
        function: of a parameter's names, such as ("decoder", "0", "mlp", "up",
            "kernel"), and the names of its axes, such as ["D", "F"].
        params: as `nnx.split` gives them, or their gradients.
    """

    def of_variable(path, variable):
        names = tuple(str(getattr(key, "key", key)) for key in path)
        axes = variable.get_metadata().get("axes", "").split()
        value = function(names, axes)
        return jax.tree.map(lambda _: value, variable)

    return jax.tree_util.tree_map_with_path(
        of_variable, params, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def is_matrix(names: tuple[str, ...], axes: list[str]) -> bool:
    """Return whether a parameter is a matrix, not a vector, bias or mix of heads."""
    return len(axes) > 1 and "heads" not in axes and not names[-1].endswith("bias")


def is_orthogonalized(names: tuple[str, ...], axes: list[str]) -> bool:
    """Return whether Muon updates a parameter: a matrix of a layer, no embedding."""
    return names[0] in ("encoder", "decoder") and is_matrix(names, axes)


def matrix_axes(axes: list[str], per_head: bool) -> MuonDimensionNumbers:
    """Return which axes of a matrix are its inputs and which its outputs.

    Args:
        axes: names, such as ["D", "N", "H"].
        per_head: whether to treat the matrix of each head separately.
    """
    num_inputs = len(axes) - 1 if axes[-1] == "D" else 1
    places = range(len(axes))
    if per_head and len(axes) > 2:
        places = [place for place in places if axes[place] not in ("N", "K")]
    return MuonDimensionNumbers(
        tuple(place for place in places if place < num_inputs),
        tuple(place for place in places if place >= num_inputs),
    )


def adamw(*, beta1, beta2, epsilon, **_) -> optax.GradientTransformation:
    """Adam for every parameter."""
    return optax.scale_by_adam(beta1, beta2, epsilon)


def muon(*, muon_beta, muon_per_head, **adam) -> optax.GradientTransformation:
    """Muon for the matrices of the layers, Adam for the rest.

    Muon (Jordan et al. 2024) replaces a matrix's momentum by, roughly, the nearest
    orthogonal matrix, scaled to the same RMS for any shape. So Muon and Adam can share
    a learning rate and weight decay (Liu et al. 2025, arXiv 2502.16982).
    """

    def dimensions(params):
        def of(names, axes):
            if not is_orthogonalized(names, axes):
                return optax.MaskedNode()
            return matrix_axes(axes, muon_per_head)

        return by_parameter(of, params)

    def scale(update, numbers):
        inputs, outputs = (
            math.prod(update.shape[place] for place in places) for places in numbers
        )
        return update * MUON_RMS * max(inputs, outputs) ** 0.5

    def scaled(updates, params=None):
        del params
        return jax.tree.map(scale, updates, dimensions(updates))

    def groups(params):
        return by_parameter(
            lambda *of: "muon" if is_orthogonalized(*of) else "adam", params
        )

    direction = optax.chain(
        scale_by_muon(beta=muon_beta, weight_dimension_numbers=dimensions),
        optax.stateless(scaled),
    )
    return optax.partition({"muon": direction, "adam": adamw(**adam)}, groups)


OPTIMIZERS = {"adamw": adamw, "muon": muon}


def make_optimizer(
    *,
    name: str,
    schedule: str,
    weight_decay,
    clip_norm,
    layer_decay,
    width: int,
    **settings,
) -> optax.GradientTransformation:
    """Return an optimizer that first clips the gradient's global norm.

    All except `width` and those of `OPTIMIZER_PROGRAM_KEYS` may be traced scalars.

    Args:
        name: a name in `OPTIMIZERS`.
        schedule, width: see `learning_rate_at`.
        weight_decay: decoupled, times the learning rate; of matrices only.
        clip_norm: maximum norm; 0 for no clipping.
        layer_decay: factor on the learning rate for each layer above a parameter.
        settings: those of `SCHEDULE_KEYS`, and arguments of `OPTIMIZERS[name]`.
    """
    of_schedule = {key: settings.pop(key) for key in SCHEDULE_KEYS}
    rate = partial(learning_rate_at, schedule, width=width, **of_schedule)
    return optax.chain(
        optax.clip_by_global_norm(jnp.where(clip_norm > 0, clip_norm, jnp.inf)),
        OPTIMIZERS[name](**settings),
        optax.add_decayed_weights(weight_decay, partial(by_parameter, is_matrix)),
        optax.scale_by_learning_rate(rate),
        scale_by_depth(layer_decay),
    )


# Parts of models.transformer.Transformer below its layers.
BELOW_LAYERS = re.compile(r"types|.*embedding|.*embedding_norm|.*positions")


def layers_above(params):
    """Return a tree with the number of layers between each parameter and the output.

    It is 0 for the output and the norm before it. The decoder's layers are above the
    encoder's, and embeddings and positions are below all layers.
    """
    counts = {"encoder": 0, "decoder": 0}

    def count(names, axes):
        del axes
        if names[0] in counts:
            counts[names[0]] = max(counts[names[0]], int(names[1]) + 1)

    def above(names, axes):
        del axes
        if BELOW_LAYERS.fullmatch(names[0]):
            return sum(counts.values()) + 1
        if names[0] == "encoder_norm":
            return counts["decoder"]
        if names[0] not in counts:
            return 0
        above_in_stack = counts[names[0]] - int(names[1])
        return above_in_stack + (counts["decoder"] if names[0] == "encoder" else 0)

    by_parameter(count, params)
    return by_parameter(above, params)


def scale_by_depth(layer_decay) -> optax.GradientTransformation:
    """Scale updates by layer_decay, once for each layer above a parameter."""

    def scaled(updates, params=None):
        del params
        powers = layers_above(updates)
        return jax.tree.map(lambda u, power: u * layer_decay**power, updates, powers)

    return optax.stateless(scaled)
