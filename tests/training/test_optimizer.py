"""The optimizer and its schedules against their formulas and Optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from headcount.training.optimizer import (
    SCHEDULE_KEYS,
    SCHEDULES,
    learning_rate_at,
    make_optimizer,
)
from tests.model_cases import made

NUMBERS = {
    "muon_beta": 0.9,
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
    "layer_decay": 1.0,
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


def test_a_decay_share_of_0_does_not_decay():
    found = learning_rate_at(
        "warmup_stable_decay",
        jnp.asarray(19),
        *(0.01, 4, 128),
        decay_steps=20,
        final_share=0.1,
        decay_share=0.0,
    )
    np.testing.assert_allclose(found, 0.01, rtol=1e-6)


def test_no_warmup_starts_at_the_peak():
    assert learning_rate_at("constant", jnp.asarray(0), 0.01, 0.0, 128) == 0.01


def optimizer_of(name="adamw", muon_per_head=False, **changes):
    """Return an optimizer with `NUMBERS`."""
    numbers = NUMBERS | changes
    return make_optimizer(
        name=name,
        schedule="constant",
        muon_per_head=muon_per_head,
        width=128,
        **numbers,
    )


def clipped(gradient):
    """Return a gradient of a global norm of at most 1."""
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(gradient)))
    return jax.tree.map(lambda x: x / max(norm, 1.0), gradient)


def run(optimizer, params, gradients):
    """Return the parameters after updates."""
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        changes, state = update(gradient, state, params)
        params = optax.apply_updates(params, changes)
    return params


def rate(step):
    """Return the learning rate of the optimizers above."""
    return 0.01 * jnp.minimum((step + 1) / 4, 1)


@pytest.fixture(scope="module")
def model():
    """Parameters of one layer per stack, of all kinds, and some gradients."""
    heads = {"merge": "gated", "num_kv_heads": 2, "talking_heads": True}
    params = nnx.split(made("relative", "pre", heads))[1]
    noise = iter(jax.random.split(jax.random.key(0), 1000))
    params, *gradients = (
        jax.tree.map(lambda x: jax.random.normal(next(noise), x.shape), params)
        for _ in range(4)
    )
    return params, gradients


def named(params):
    """Return parameters by their dotted names."""
    flat = nnx.to_flat_state(params)
    return {".".join(map(str, name)): variable[...] for name, variable in flat}


MATRICES = ("embedding", "query", "key", "value", "merge.kernel", "merge.gate")
MATRICES += ("mlp.up.kernel", "mlp.down.kernel")


@pytest.mark.slow
def test_adamw_equals_optax_with_the_decay_of_matrices_alone(model):
    params, gradients = model
    flat = [named(x) for x in (params, *map(clipped, gradients))]
    decayed = {name: name.endswith(MATRICES) for name in flat[0]}
    kept = {name.rsplit(".", 1)[-1] for name, yes in decayed.items() if not yes}
    assert kept >= {"query_bias", "merge_bias", "scale", "bias", "logits_mix"}
    theirs = optax.adamw(rate, 0.9, 0.98, 1e-9, weight_decay=0.1, mask=decayed)
    wanted = run(theirs, flat[0], flat[1:])
    found = named(run(optimizer_of(), params, gradients))
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-5)


def as_matrices(name, value, per_head):
    """Return a parameter of the model as a list of matrices, inputs by outputs."""
    last = name.rsplit(".", 1)[-1]
    if last in ("query", "key", "value"):
        heads = [value[:, i] for i in range(value.shape[1])]
        return heads if per_head else [np.concatenate(heads, axis=1)]
    if "merge.kernel" in name:
        return list(value) if per_head else [np.concatenate(list(value))]
    return [value]


@pytest.mark.slow
@pytest.mark.parametrize("per_head", [False, True])
def test_muon_equals_optax_on_each_matrix_and_adamw_on_the_rest(model, per_head):
    params, gradients = model
    optimizer = optimizer_of("muon", per_head)
    found = named(run(optimizer, params, gradients))
    alone = named(run(optimizer_of(), params, gradients))
    theirs = optax.contrib.muon(rate, beta=0.9, weight_decay=0.1, consistent_rms=0.2)
    before, *pulls = (named(x) for x in (params, *map(clipped, gradients)))
    moved = set()
    for name, value in found.items():
        if not name.endswith(MATRICES[1:]):
            np.testing.assert_array_equal(value, alone[name])
            continue
        parts = [as_matrices(name, x[name], per_head) for x in (found, before, *pulls)]
        for result, start, *matrices in zip(*parts, strict=True):
            wanted = run(theirs, start, matrices)
            np.testing.assert_allclose(result, wanted, rtol=1e-3, atol=1e-4)
        moved.add(name)
    assert len(moved) == 2 * 2 + 4 * 3 + 3  # MLPs, attention, gates


@pytest.mark.slow
def test_muon_per_head_of_one_head_is_muon():
    params = nnx.split(made("relative", "pre", {"num_heads": 1}))[1]
    noise = iter(jax.random.split(jax.random.key(0), 1000))
    gradient = jax.tree.map(lambda x: jax.random.normal(next(noise), x.shape), params)
    whole, heads = (run(optimizer_of("muon", of), params, [gradient]) for of in (0, 1))
    for a, b in zip(*map(jax.tree.leaves, (whole, heads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_muon_of_a_gradient_of_zero_moves_nothing(model):
    """As that of a head whose gate is 0."""
    params, gradients = model
    zero = [jax.tree.map(jnp.zeros_like, gradients[0])]
    found = run(optimizer_of("muon", weight_decay=0.0), params, zero)
    for old, new in zip(*map(jax.tree.leaves, (params, found)), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.slow
def test_a_clip_norm_of_zero_does_not_clip(model):
    params, (gradient, *_) = model
    gradient = jax.tree.map(lambda x: 100 * x, gradient)
    found = [run(optimizer_of(clip_norm=x), params, [gradient]) for x in (0.0, 1e9)]
    for one, other, old in zip(*map(jax.tree.leaves, (*found, params)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert (one != old).any()


@pytest.mark.slow
def test_layer_decay_scales_each_layer_by_those_above_it(model):
    """One more factor per layer, and none at the output; the decoder is above."""
    params, (gradient, *_) = model
    old, usual, slow = (
        named(x)
        for x in (
            params,
            *(run(optimizer_of(layer_decay=x), params, [gradient]) for x in (1.0, 0.5)),
        )
    )
    powers = {"embedding": 3, "encoder_positions": 3, "decoder_positions": 3}
    powers |= {"encoder.0": 2, "decoder.0": 1, "encoder_norm": 1, "decoder_norm": 0}
    seen = set()
    for name in old:
        (part,) = [part for part in powers if f"{name}.".startswith(f"{part}.")]
        wanted = (usual[name] - old[name]) * 0.5 ** powers[part]
        np.testing.assert_allclose(slow[name] - old[name], wanted, atol=1e-5)
        seen.add(part)
    assert seen == powers.keys()
