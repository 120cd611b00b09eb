"""Optimizers and learning-rate schedules, whose numbers may differ between trials."""

import jax.numpy as jnp
import optax


def inverse_sqrt(step, *, warmup_steps, **_):
    """Linear warm-up, then 1 / sqrt(step) (fairseq)."""
    return jnp.minimum(step / warmup_steps, jnp.sqrt(warmup_steps / step))


def noam(step, *, warmup_steps, width, **_):
    """The same curve with a peak that depends on the width (Vaswani et al. 2017)."""
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
    length = jnp.maximum(decay_share * decay_steps, 1)
    progress = (step - (decay_steps - length)) / length
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


def make_optimizer(
    *,
    schedule: str,
    learning_rate,
    warmup_steps,
    decay_steps,
    final_share,
    decay_share,
    beta1,
    beta2,
    epsilon,
    weight_decay,
    clip_norm,
    width: int,
) -> optax.GradientTransformation:
    """Return AdamW behind a clip of the gradient's global norm (clip_norm 0: none).

    All arguments but `schedule` and `width` may be traced scalars.
    """

    def rate(step):
        return learning_rate_at(
            schedule,
            step,
            learning_rate,
            warmup_steps,
            width,
            decay_steps=decay_steps,
            final_share=final_share,
            decay_share=decay_share,
        )

    return optax.chain(
        optax.clip_by_global_norm(jnp.where(clip_norm > 0, clip_norm, jnp.inf)),
        optax.scale_by_adam(beta1, beta2, epsilon),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )
