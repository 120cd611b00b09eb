"""Updates of a group of trials: equal to each trial alone, frozen if it diverges."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from headcount.configs.base import get_config
from headcount.configs.validation import flat
from headcount.data.batches import PackedBatches, stack_steps
from headcount.data.examples import Ragged
from headcount.models.cost import abstract
from headcount.models.transformer import Transformer
from headcount.tasks.translation import Translation
from headcount.training.selection import stop_without_progress
from headcount.training.step import (
    init,
    loss_and_gradient,
    make_static,
    train_steps,
)
from headcount.training.trials import hyperparameters

VOCAB, EOS = 40, 2


@pytest.fixture(scope="module")
def corpus():
    """Sentences of 2 to 9 random tokens, and their mirror images to translate to."""
    rng = np.random.default_rng(0)
    source = [[*rng.integers(3, VOCAB, size), EOS] for size in rng.integers(2, 10, 300)]
    target = [[*ids[-2::-1], EOS] for ids in source]
    return {"source": Ragged.of(source), "target": Ragged.of(target)}


@pytest.fixture(scope="module")
def config():
    config = get_config()
    config.model.width, config.model.mlp_dim = 16, 24
    config.model.num_encoder_layers = config.model.num_decoder_layers = 1
    config.model.attention.num_heads = 2
    config.optimizer.warmup_steps = 10
    return config


@pytest.fixture(scope="module")
def program(config):
    build = partial(Transformer, VOCAB, **config.model.to_dict())
    return make_static(abstract(build), config, Translation(config).loss), build


def batches_of(corpus, trials):
    seeds = [trial["seed"] for trial in trials]
    return PackedBatches(corpus, batch_tokens=256, max_length=64, seeds=seeds)


def trained(config, corpus, program, trials, spans, most=25):
    """Return metrics (R, steps) and the final state after spans of so many steps."""
    static, build = program
    arrays = hyperparameters(flat(config.to_dict()), trials)
    batches = batches_of(corpus, trials)
    state = init(arrays, static=static, build=build)
    found, step = [], 0
    for number in spans:
        some = stack_steps(batches, step, number, most)
        state, metrics = train_steps(state, arrays, some, number, static=static)
        found.append(jax.tree.map(lambda x, n=number: x[:, :n], metrics))
        step += number
    return jax.tree.map(lambda *x: np.concatenate(x, axis=1), *found), state


TRIALS = [
    {"seed": 3, "optimizer.learning_rate": 1e-2, "model.dropout": 0.1},
    {"seed": 7, "optimizer.learning_rate": 3e-3, "model.dropout": 0.3},
    {"seed": 3, "optimizer.learning_rate": 1e-2, "optimizer.label_smoothing": 0.0},
]


@pytest.mark.slow
def test_a_trial_of_a_group_equals_the_same_trial_alone_bit_for_bit(
    config, corpus, program
):
    """Own initial values, data order, dropout, schedule: 50 steps of each."""
    group = trained(config, corpus, program, TRIALS, [25, 25])[0]["loss"]
    for index, trial in enumerate(TRIALS):
        alone = trained(config, corpus, program, [trial], [25, 25])[0]["loss"]
        np.testing.assert_array_equal(group[index], alone[0])  # bits, on one CPU device
    assert group[:, -1].max() < 0.95 * group[:, 0].min()
    assert abs(group[0, 0] - group[1, 0]) > 1e-3 < abs(group[0, 1] - group[2, 1])


@pytest.mark.slow
def test_trials_of_muon_and_attention_dropout_equal_each_alone(config, corpus):
    config = config.copy_and_resolve_references()
    config.optimizer.name = "muon"
    config.model.attention.dropout = 0.1
    build = partial(Transformer, VOCAB, **config.model.to_dict())
    program = make_static(abstract(build), config, Translation(config).loss), build
    trials = [TRIALS[1], TRIALS[0], TRIALS[0] | {"optimizer.muon_beta": 0.5}]
    group = trained(config, corpus, program, trials, [25])[0]["loss"]
    alone = trained(config, corpus, program, trials[2:], [25])[0]["loss"]
    np.testing.assert_array_equal(group[2], alone[0])
    assert group[:, -1].max() < 0.95 * group[:, 0].min()
    assert group[1, 0] == group[2, 0] and abs(group[1, 9] - group[2, 9]) > 1e-4


def test_each_seed_initializes_different_parameters(config, program):
    arrays = hyperparameters(flat(config.to_dict()), [{"seed": 3}, {"seed": 7}])
    params = init(arrays, static=program[0], build=program[1]).params
    first, second = params["embedding"][...].reshape(2, -1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.2


def test_loss_is_nats_per_real_token_with_a_dropout_mask_of_seed_and_step(
    config, corpus, program
):
    """On one batch twice: a learning rate of 0 leaves the parameters as they are."""
    same = {"optimizer.learning_rate": 0.0, "optimizer.label_smoothing": 0.2}
    trials = [
        {"seed": 0, "model.dropout": 0.0},
        {"seed": 0, "model.dropout": 0.3},
        {"seed": 1, "model.dropout": 0.3},
    ]
    arrays = hyperparameters(flat(config.to_dict()), [trial | same for trial in trials])
    static, build = program
    state = init(arrays, static=static, build=build)
    params = jax.tree.map(lambda x: x[0], state.params)
    alike = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape), state.params)
    state = state._replace(params=alike)
    batch = {name: x[0] for name, x in batches_of(corpus, trials[:1])[0].items()}
    twice = {name: np.broadcast_to(x, (3, 25, *x.shape)) for name, x in batch.items()}
    _, metrics = train_steps(state, arrays, twice, 2, static=static)
    logits = jax.jit(lambda *of: nnx.merge(static.graph, of[0])(of[1]))(params, batch)
    log_probs = scipy.special.log_softmax(np.float64(logits), -1)
    target = 0.8 * np.eye(VOCAB)[batch["target"]] + 0.2 / VOCAB
    real = {side: batch[f"{side}_segments"] > 0 for side in ("source", "target")}
    assert not any(x.all() for x in real.values())
    wanted = -(target * log_probs).sum(-1)[real["target"]].mean()
    loss = np.asarray(metrics["loss"])[:, :2]
    np.testing.assert_allclose(loss[0], wanted, rtol=1e-5)
    assert len({wanted, *loss[1:].ravel().tolist()}) == 5
    for side, tokens in real.items():
        assert (metrics["tokens"][side][:, :2] == tokens.sum()).all()
    assert (metrics["weight"][:, :2] == real["target"].sum()).all()


def test_learning_rate_follows_the_schedule_from_the_first_update(
    config, corpus, program
):
    """Adam's first update changes a parameter by the learning rate."""
    arrays = hyperparameters(flat(config.to_dict()), TRIALS)
    before = init(arrays, static=program[0], build=program[1]).params
    metrics, state = trained(config, corpus, program, TRIALS, [1])
    peaks = np.array([1e-2, 3e-3, 1e-2])
    for trial, peak in enumerate(peaks):
        moved = jax.tree.map(lambda x, y, i=trial: x[i] - y[i], state.params, before)
        largest = max(float(abs(x).max()) for x in jax.tree.leaves(moved))
        assert largest == pytest.approx(peak / 10, rel=1e-3)
    metrics, _ = trained(config, corpus, program, TRIALS, [12])
    update = np.arange(1, 13)
    curve = np.minimum(update / 10, np.sqrt(10 / update))
    np.testing.assert_allclose(metrics["learning_rate"], peaks[:, None] * curve, 1e-6)


def test_steps_of_one_dispatch_equal_one_step_per_dispatch(config, corpus, program):
    """Bit for bit in calls of one program; up to rounding in a program of one step."""
    together, state = trained(config, corpus, program, TRIALS, [12])
    for spans in ([1] * 12, [5, 7]):
        apart, last = trained(config, corpus, program, TRIALS, spans)
        pairs = (together, state), (apart, last)
        for one, other in zip(*map(jax.tree.leaves, pairs), strict=True):
            np.testing.assert_array_equal(one, other)
    single, _ = trained(config, corpus, program, TRIALS, [1] * 12, most=1)
    np.testing.assert_allclose(single["loss"], together["loss"], rtol=2e-5)


@pytest.mark.slow
def test_heads_with_a_gate_of_zero_get_no_gradient(config, corpus, program):
    """All other heads do, and the trial beside it is as if alone."""
    gate = {"head_gates.cross.0.1": 0}
    trials = [
        {"seed": 0},
        {"seed": 0, **gate},
        {"seed": 1, "head_gates.encoder.0.0": 2},
    ]
    before = init(
        hyperparameters(flat(config.to_dict()), trials),
        static=program[0],
        build=program[1],
    )
    metrics, state = trained(config, corpus, program, trials, [8])
    moved = jax.tree.map(lambda new, old: new != old, state.params, before.params)
    decoder = moved["decoder"][0]["cross_attention"]
    for kernel in ("query", "key", "value"):  # R D N H
        by_head = decoder[kernel][...].any(axis=(1, 3))
        assert by_head.tolist() == [[True, True], [True, False], [True, True]]
    alone, _ = trained(config, corpus, program, trials[:1], [8])
    np.testing.assert_allclose(metrics["loss"][0], alone["loss"][0], rtol=1e-5)
    assert abs(metrics["loss"][1, 0] - metrics["loss"][0, 0]) > 1e-4


def test_a_trial_that_diverges_is_frozen_and_the_others_continue(
    config, corpus, program
):
    # three, as in the group above: the compiled program is the same
    trials = [{"seed": 0}, {"seed": 0, "optimizer.learning_rate": 1e30}, {"seed": 1}]
    metrics, state = trained(config, corpus, program, trials, [6, 2])
    (at,) = np.flatnonzero(metrics["diverged"][1])  # once, then frozen
    np.testing.assert_array_equal(metrics["updated"][1], np.arange(8) < at)
    assert metrics["updated"][::2].all() and not metrics["diverged"][::2].any()
    assert state.diverged_at.tolist() == [0, at + 1, 0]
    assert state.step.tolist() == [8, at, 8]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    alone, _ = trained(config, corpus, program, trials[:1], [8])
    np.testing.assert_allclose(metrics["loss"][0], alone["loss"][0], rtol=1e-5)


@pytest.mark.slow
def test_a_trial_without_progress_is_frozen(config, corpus, program):
    _, state = trained(config, corpus, program, TRIALS, [1])
    best = {"step": np.array([10, 20, 5])}
    state = state._replace(diverged_at=jnp.array([0, 0, 7]))
    state, late = stop_without_progress(state, best, before=10, step=30)
    assert late.tolist() == [0] and state.stopped_at.tolist() == [30, 0, 0]
    assert state.frozen.tolist() == [True, False, True]
    before = jax.tree.map(np.array, state.params)
    arrays = hyperparameters(flat(config.to_dict()), TRIALS)
    batch = stack_steps(batches_of(corpus, TRIALS), 1, 1, 25)
    state, metrics = train_steps(state, arrays, batch, 1, static=program[0])
    assert metrics["updated"][:, 0].tolist() == [False, True, False]
    for old, new in zip(*map(jax.tree.leaves, (before, state.params)), strict=True):
        np.testing.assert_array_equal(old[::2], new[::2])
    assert state.stopped_at.tolist() == [30, 0, 0]


def test_accumulation_over_parts_equals_the_whole_batch(config, corpus, program):
    """Also where the parts have different numbers of tokens to divide by."""
    static, build = program
    trials = [{"seed": 0, "model.dropout": 0.0}]
    arrays = hyperparameters(flat(config.to_dict()), trials)
    state = init(arrays, static=static, build=build)
    batch = batches_of(corpus, trials)[0]
    trial, params, batch = jax.tree.map(lambda x: x[0], (arrays, state.params, batch))
    real = (batch["target_segments"] > 0).sum(1)
    assert real[::2].sum() != real[1::2].sum()  # of the parts
    key = jax.random.key(0)
    jitted = jax.jit(loss_and_gradient, static_argnames="static")
    whole = jitted(params, trial, batch, key, static=static)
    parts = jitted(
        params, trial, batch, key, static=static._replace(accumulate_steps=2)
    )
    for one, other in zip(*map(jax.tree.leaves, (parts, whole)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
