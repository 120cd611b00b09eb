"""The chunked cross-entropy against NumPy in float64, the plain formula and itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount.models import cross_entropy as loss_module
from headcount.models.cross_entropy import (
    MIB,
    TRIALS,
    _chunk_tokens_tpu,
    _num_chunks,
    _num_trials,
    cross_entropy,
)
from tests.programs import shapes

VOCAB, WIDTH = 37, 8


def example(tokens, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((tokens, WIDTH)).astype(dtype)
    table = rng.standard_normal((VOCAB, WIDTH)).astype(dtype)
    labels = rng.integers(0, VOCAB, tokens).astype(np.int32)
    weights = rng.uniform(0.1, 2, tokens).astype(np.float32)
    weights[::4] = 0
    return hidden, table, labels, weights


def in_float64(hidden, table, labels, weights, smoothing):
    logits = hidden.astype(np.float64) @ table.astype(np.float64).T
    top = logits.max(-1, keepdims=True)
    log_softmax = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    target = np.full_like(logits, smoothing / VOCAB)
    target[np.arange(labels.size), labels] += 1 - smoothing
    return weights @ -(target * log_softmax).sum(-1)


def plain(hidden, table, labels, weights, smoothing):
    log_softmax = jax.nn.log_softmax(jnp.dot(hidden, table.T, precision="highest"))
    target = (1 - smoothing) * jax.nn.one_hot(labels, VOCAB) + smoothing / VOCAB
    return -jnp.sum(weights[:, None] * target * log_softmax)


def differentiate(loss, *arguments):
    by = (0, 1, 3, 4)  # hidden, table, weights and label_smoothing
    return jax.jit(jax.grad(loss, by))(*arguments)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens, chunk", [(12, 4), (13, 4), (3, 4), (1, 1), (9, None)])
def test_loss_equals_numpy_in_float64(tokens, chunk, smoothing):
    arrays = example(tokens)
    expected = in_float64(*arrays, smoothing)
    loss = jax.jit(cross_entropy, static_argnums=5)(*arrays, smoothing, chunk)
    np.testing.assert_allclose(loss, expected, rtol=2e-6)
    f = jax.jit(jax.value_and_grad(cross_entropy), static_argnums=5)
    differentiated, _ = f(*arrays, smoothing, chunk)
    np.testing.assert_allclose(differentiated, expected, rtol=2e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("tokens, chunk", [(12, 4), (13, 4), (3, 4), (1, 1), (9, None)])
def test_gradients_equal_those_of_the_plain_formula(tokens, chunk, smoothing):
    arrays = *example(tokens), smoothing
    chunked = differentiate(lambda *a: cross_entropy(*a, chunk), *arrays)
    for gradient, expected in zip(chunked, differentiate(plain, *arrays), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradients_equal_finite_differences(smoothing):
    hidden, table, labels, weights = example(6)
    gradient = jax.jit(jax.grad(lambda *a: cross_entropy(*a, 4), (0, 1)))
    by_hidden, by_table = gradient(hidden, table, labels, weights, smoothing)
    rng = np.random.default_rng(1)
    directions = rng.standard_normal(hidden.shape), rng.standard_normal(table.shape)

    def along(step):
        moved = hidden + step * directions[0], table + step * directions[1]
        return in_float64(*moved, labels, weights, smoothing)

    expected = (along(1e-5) - along(-1e-5)) / 2e-5
    slope = np.vdot(by_hidden, directions[0]) + np.vdot(by_table, directions[1])
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


@pytest.mark.parametrize("trials", [1, 3])
def test_trials_with_smoothings_of_their_own_equal_the_same_alone(trials):
    smoothings = np.linspace(0, 0.2, trials, dtype=np.float32)
    examples = [example(13, seed) for seed in range(trials)]
    stacked = tuple(np.stack(arrays) for arrays in zip(*examples, strict=True))
    f = jax.value_and_grad(lambda *a: cross_entropy(*a, 4), (0, 1))
    together = jax.jit(jax.vmap(f))(*stacked, smoothings)
    f = jax.jit(f)
    for trial in range(trials):
        alone = f(*examples[trial], smoothings[trial])
        assert jax.tree.structure(alone) == jax.tree.structure(together)
        for x, y in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(x[trial], y, rtol=1e-5, atol=1e-6)


def test_padding_of_weight_zero_changes_nothing():
    hidden, table, labels, weights = example(12)
    real = weights > 0

    def gradient(chunk, *arrays):
        loss = jax.grad(lambda *a: cross_entropy(*a, 0.1, chunk), (0, 1))
        return jax.jit(loss)(*arrays)

    by_hidden, by_table = gradient(5, hidden, table, labels, weights)
    kept = hidden[real], table, labels[real], weights[real]
    expected = gradient(None, *kept)
    np.testing.assert_allclose(by_hidden[real], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_table, expected[1], rtol=1e-5, atol=1e-5)
    assert not by_hidden[~real].any()


def test_large_logits_neither_overflow_nor_lose_the_loss():
    hidden, table, labels, weights = example(12)
    arrays = 100 * hidden, table, labels, weights
    f = jax.jit(jax.value_and_grad(lambda *a: cross_entropy(*a, 0.1)))
    loss, gradient = f(*arrays)
    np.testing.assert_allclose(loss, in_float64(*arrays, 0.1), rtol=1e-6)
    assert np.isfinite(gradient).all()


def test_bfloat16_is_summed_in_float32():
    hidden, table, labels, weights = example(40, dtype=jnp.bfloat16)
    arrays = hidden, table, labels, weights
    f = jax.value_and_grad(cross_entropy, (0, 1))
    loss, gradients = jax.jit(f, static_argnums=5)(*arrays, 0.1, 8)
    assert loss.dtype == jnp.float32
    assert [x.dtype for x in gradients] == [jnp.bfloat16, jnp.bfloat16]
    expected = in_float64(*arrays, 0.1)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)  # exps round to 8 bits


def test_gradients_of_a_label_of_many_tokens_are_added_up_in_float32():
    """In bfloat16 256 + 1 is 256, and a frequent piece has more tokens in a batch."""
    hidden, table = jnp.ones((1000, 8), jnp.bfloat16), jnp.zeros((37, 8), jnp.bfloat16)
    labels, weights = jnp.zeros(1000, jnp.int32), jnp.ones(1000)
    found = jax.jit(jax.grad(cross_entropy, 1))(hidden, table, labels, weights)
    np.testing.assert_allclose(np.float32(found[0]), 1000 * (1 / 37 - 1), rtol=1e-2)


def test_no_array_holds_the_logits_of_all_tokens():
    arrays = example(64)
    step = jax.value_and_grad(lambda *a: cross_entropy(*a, 0.1, 8), (0, 1))
    largest = max(map(np.prod, shapes(jax.make_jaxpr(step)(*arrays).jaxpr)))
    assert largest == 64 * WIDTH  # hidden, larger here than the 8 x VOCAB of a chunk


def test_dev_loss_does_no_gradient_work():
    def products(f):
        text = jax.jit(f).lower(*example(12)).as_text()
        return text.count("stablehlo.dot_general")

    def loss(*arrays):
        return cross_entropy(*arrays, 0.1, 4)

    # The gradients of hidden and table are a product each.
    assert products(jax.value_and_grad(loss, (0, 1))) == products(loss) + 2


@pytest.mark.parametrize("num_trials", [1, 16])
def test_chunks_for_a_gpu_bound_the_logits_of_all_trials(num_trials, monkeypatch):
    monkeypatch.setattr(loss_module, "platform", lambda: "gpu")
    monkeypatch.setattr(loss_module, "_num_trials", lambda: num_trials)
    vocab = 8000
    logits = num_trials * loss_module._chunk_tokens(vocab, 128) * vocab * 4  # bytes
    bound = loss_module.CHUNK_BYTES["gpu"]
    assert bound / 2 < logits <= bound


def test_trials_side_by_side_are_counted():
    seen = []

    def one(x):
        seen.append(_num_trials())
        return x

    jax.vmap(one, axis_name=TRIALS)(jnp.zeros(5))
    jax.lax.map(one, jnp.zeros(5))
    assert seen == [5, 1]


@pytest.mark.parametrize("num_trials", [1, 4, 64])
@pytest.mark.parametrize("vocab, width", [(10_000, 128), (37_000, 512), (300, 64)])
def test_chunks_for_a_tpu_fit_beside_the_table_or_have_many_tokens(
    vocab, width, num_trials
):
    tokens = _chunk_tokens_tpu(vocab, width, num_trials)
    logits = 4 * tokens * vocab * num_trials
    held = 6 * vocab * width * num_trials + logits
    assert held < 128 * MIB or (
        tokens >= width and (tokens == width or logits < 128 * MIB)
    )
    assert logits > 16 * MIB


@pytest.mark.parametrize("tokens, chunk", [(32, 8), (24, 13), (12, 6)])
def test_what_each_device_adds_up_over_chunks_is_the_whole(monkeypatch, tokens, chunk):
    arrays = *example(tokens), 0.1
    monkeypatch.setattr(loss_module, "_num_devices", lambda: 4)
    shared = differentiate(lambda *a: cross_entropy(*a, chunk), *arrays)
    for gradient, expected in zip(shared, differentiate(plain, *arrays), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "tokens, most, num_devices, wanted",
    [(24, 13, 1, 2), (24, 13, 8, 3), (32, 11, 8, 4), (12, 6, 5, 2), (13, 4, 1, 4)],
)
def test_chunks_have_equal_shares_of_each_device_where_they_can(
    tokens, most, num_devices, wanted
):
    assert _num_chunks(tokens, most, num_devices) == wanted
