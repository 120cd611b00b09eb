"""Adam with warm-up and clipping, every number of it data that trials may differ in."""

import jax.numpy as jnp
import optax


def inverse_sqrt(step, learning_rate, warmup_steps, width):
    """Linear to the peak, then falling as 1 / sqrt(step) (fairseq)."""
    del width
    return learning_rate * jnp.minimum(
        step / warmup_steps, jnp.sqrt(warmup_steps / step)
    )


def noam(step, learning_rate, warmup_steps, width):
    """The same curve with the peak tied to width and warm-up (Vaswani et al. 2017)."""
    peak = learning_rate * (width * warmup_steps) ** -0.5
    return inverse_sqrt(step, peak, warmup_steps, width)


def constant(step, learning_rate, warmup_steps, width):
    """Linear to the peak, then level."""
    del width
    return learning_rate * jnp.minimum(step / warmup_steps, 1.0)


SCHEDULES = {"inverse_sqrt": inverse_sqrt, "noam": noam, "constant": constant}


def learning_rate_at(schedule, step, learning_rate, warmup_steps, width):
    """The rate of update number `step` (from 0)."""
    warmup_steps = jnp.maximum(warmup_steps, 1)
    return SCHEDULES[schedule](step + 1.0, learning_rate, warmup_steps, width)


def make_optimizer(
    *,
    schedule: str,
    learning_rate,
    warmup_steps,
    beta1,
    beta2,
    epsilon,
    weight_decay,
    clip_norm,
    width: int,
) -> optax.GradientTransformation:
    """AdamW behind a clip of the gradient's global norm; 0 does not clip.

    All but `schedule` and `width` may be traced scalars.
    """

    def rate(step):
        return learning_rate_at(schedule, step, learning_rate, warmup_steps, width)

    return optax.chain(
        optax.clip_by_global_norm(jnp.where(clip_norm > 0, clip_norm, jnp.inf)),
        optax.scale_by_adam(beta1, beta2, epsilon),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
