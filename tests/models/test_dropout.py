"""Dropout's random bits: as good as independent, and a function of their key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from headcount.models import layers, transformer
from headcount.models.dropout import dropout, random_bits
from tests.model_cases import PACKED, tiny

SHAPE = (64, 64, 128)


def kept(key, index=0):
    key = jax.random.key(key) if isinstance(key, int) else key
    return np.asarray(dropout(jnp.ones(SHAPE), (jnp.float32(0.3), key), index)) > 0


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.3, 0.9])
def test_rate_and_scale(rate):
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    out = np.asarray(dropout(jnp.asarray(x), (rate, jax.random.key(0)), 0))
    deviation = np.sqrt(rate * (1 - rate) / x.size)
    assert abs((out == 0).mean() - rate) <= 5 * deviation
    np.testing.assert_allclose(out[out != 0], x[out != 0] / (1 - rate), rtol=1e-6)


def test_no_key_leaves_the_input():
    x = jnp.ones(3)
    assert dropout(x, None, 0) is x


def test_masks_of_neighbours_keys_and_places_are_uncorrelated():
    mask = kept(0)
    others = [np.roll(mask, 1, axis) for axis in range(3)]
    others += [np.roll(mask, shift, 2) for shift in (2, 32, 64)]
    others += [kept(0, index=1), kept(1), kept(2**31)]
    others += [kept(jax.random.fold_in(jax.random.key(0), step)) for step in range(3)]
    for other in others:
        correlation = np.corrcoef(mask.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / np.sqrt(mask.size)


def test_rows_vary_as_independent_bits_do():
    counts = kept(3).sum(-1)  # of 128 each
    expected = 128 * 0.3 * 0.7
    assert abs(counts.var() / expected - 1) < 5 * np.sqrt(2 / counts.size)


def test_every_bit_is_even():
    bits = np.asarray(random_bits(jax.random.key(5), (2**20,)))
    for position in range(32):
        share = ((bits >> position) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(bits.size)
    values = np.bincount(bits >> 22, minlength=1024)  # chi-squared of the top ten bits
    squared = ((values - 1024) ** 2 / 1024).sum()
    assert abs(squared - 1023) < 5 * np.sqrt(2 * 1023)


def test_trials_have_their_own_masks_and_rates():
    rates = jnp.array([0.1, 0.5])
    keys = jax.vmap(jax.random.key)(jnp.arange(2))
    together = jax.vmap(lambda *drop: dropout(jnp.ones(SHAPE), drop, 0))(rates, keys)
    for out, rate, key in zip(together, rates, keys, strict=True):
        np.testing.assert_array_equal(out, dropout(jnp.ones(SHAPE), (rate, key), 0))


def test_every_place_of_a_model_has_its_own_mask(monkeypatch):
    """After the embeddings of both stacks, and after each sublayer of each layer."""
    model = tiny()(rngs=nnx.Rngs(0))
    seen = []

    def spy(x, rate_and_key, index):
        rate, key = rate_and_key
        seen.append(jax.random.key_data(jax.random.fold_in(key, index)))
        return dropout(x, rate_and_key, index)

    for module in (layers, transformer):
        monkeypatch.setattr(module, "dropout", spy)

    @jax.jit
    def keys_of(key):
        model.hidden(PACKED, rate=0.5, key=key)
        return jnp.stack(seen)

    keys = keys_of(jax.random.key(0)).tolist()
    assert len(keys) == 2 + 2 * 2 + 2 * 3
    assert len(set(map(tuple, keys))) == len(keys)
