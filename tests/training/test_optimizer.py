"""The optimizer and its schedules against their formulas and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from headcount.training.optimizer import (
    SCHEDULE_KEYS,
    SCHEDULES,
    learning_rate_at,
    make_optimizer,
)

NUMBERS = {
    "learning_rate": 0.01,
    "warmup_steps": 4.0,
    "decay_steps": 20.0,
    "final_share": 0.1,
    "decay_share": 0.25,
    "beta1": 0.9,
    "beta2": 0.98,
    "epsilon": 1e-9,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
}


def expected(schedule, update):
    """Return the rate of update 1, 2, ...: a peak of 0.01, width 128, 4 to warm up."""
    peak, warmup, width, end = 0.01, 4, 128, 20
    if schedule == "constant":
        return peak * min(update / warmup, 1)
    if schedule == "inverse_sqrt":
        return peak * (update / warmup if update < warmup else (warmup / update) ** 0.5)
    if schedule == "noam":  # Vaswani et al. 2017, equation 3, times a factor
        return peak * width**-0.5 * min(update**-0.5, update * warmup**-1.5)
    if schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0, peak, warmup, end, 0.1 * peak)(
            update
        )
    rise = optax.linear_schedule(0, peak, warmup)
    if schedule == "linear":
        fall = optax.linear_schedule(peak, 0.1 * peak, end - warmup)
        return optax.join_schedules([rise, fall], [warmup])(update)
    assert schedule == "warmup_stable_decay"
    start = end - end // 4
    fall = optax.linear_schedule(peak, 0.1 * peak, end - start)
    flat = optax.constant_schedule(peak)
    return optax.join_schedules([rise, flat, fall], [warmup, start])(update)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [0, 1, 3, 4, 13, 14, 16, 19, 100])
def test_schedule_equals_its_formula(schedule, step):
    keys = {key: NUMBERS[key] for key in SCHEDULE_KEYS}
    got = learning_rate_at(schedule, jnp.asarray(step), width=128, **keys)
    np.testing.assert_allclose(got, expected(schedule, step + 1), rtol=1e-6)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_at("constant", jnp.asarray(0), 0.01, 0.0, 128) == 0.01


def test_optimizer_equals_optax_adamw_of_the_clipped_gradient():
    params = {"w": jnp.arange(4.0), "b": jnp.ones(2)}
    ours = make_optimizer(schedule="constant", width=128, **NUMBERS)
    theirs = optax.adamw(
        lambda step: 0.01 * min((step + 1) / 4, 1), 0.9, 0.98, 1e-9, weight_decay=0.1
    )
    state, their_state = ours.init(params), theirs.init(params)
    their_params = params
    for step in range(6):
        gradient = jax.tree.map(lambda x, step=step: jnp.cos(x + step), params)
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradient.values()))
        clipped = jax.tree.map(lambda g, norm=norm: g / max(norm, 1.0), gradient)
        with jax.disable_jit():  # the schedule above is plain Python
            updates, their_state = theirs.update(clipped, their_state, their_params)
        their_params = optax.apply_updates(their_params, updates)
        updates, state = ours.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        for ours_leaf, theirs_leaf in zip(
            params.values(), their_params.values(), strict=True
        ):
            np.testing.assert_allclose(ours_leaf, theirs_leaf, rtol=2e-6)


def test_a_clip_norm_of_zero_does_not_clip():
    params = {"w": jnp.zeros(4)}
    gradient = {"w": jnp.full(4, 100.0)}
    steps = []
    for clip_norm in (0.0, 1e6):
        optimizer = make_optimizer(
            schedule="constant", width=128, **NUMBERS | {"clip_norm": clip_norm}
        )
        steps.append(optimizer.update(gradient, optimizer.init(params), params)[0]["w"])
    np.testing.assert_array_equal(*steps)
    assert (steps[0] != 0).all()
