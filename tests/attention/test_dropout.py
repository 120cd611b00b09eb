"""Which weights are dropped: at the rate, without a pattern, the same everywhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount import attention
from headcount.attention import dropout
from tests.attention_cases import CPU

attend = attention.dot_product_attention
B, T, S, N, H = 3, 70, 130, 4, 8
NAMES = "reference", "blockwise", CPU, "tpu_interpret"


@functools.cache
def by_hand(seed, rate):
    """The kept weights, `B N T S`, by the documented hash in Python's own integers."""

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ (x >> 16)

    def kept(b, n, t, s):
        key = seed
        for index in (0, b, n, t):
            key = mixed((key + index) & 0xFFFFFFFF)
        x = (key ^ (s * 0x9E3779B9)) & 0xFFFFFFFF
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
        return x >> 8 >= round(rate * 2**24)

    found = [kept(*place) for place in np.ndindex(B, N, T, S)]
    return np.reshape(found, (B, N, T, S))


def kept(implementation, seed, rate=0.25, shape=(B, T, S, N)):
    """Which weights an implementation keeps: of keys with values of their own."""
    B, T, S, N = shape
    query, key = jnp.zeros((B, T, N, H)), jnp.zeros((B, S, N, H))
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    out = attend(
        *(query, key, value),
        dropout_rate=rate,
        dropout_seed=seed,
        implementation=implementation,
    )
    weights = np.asarray(out).transpose(0, 2, 1, 3) * S * (1 - rate)
    np.testing.assert_allclose(weights[weights > 0], 1, rtol=1e-5)
    return weights > 0


@pytest.mark.parametrize("implementation", NAMES)
def test_bits_are_those_of_the_documented_hash(implementation):
    seed = 2**32 - 3
    np.testing.assert_array_equal(kept(implementation, seed), by_hand(seed, 0.25))


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_bits_have_the_rate_and_no_pattern(rate):
    """Means and correlations of neighbours along every axis lie within 5 deviations."""
    shape = 4, 200, 200, 4
    two = np.stack([kept("blockwise", seed, rate, shape) for seed in (0, 1)])
    bits = (two - (1 - rate)) / np.sqrt(rate * (1 - rate))
    assert abs(bits.mean()) < 5 / np.sqrt(bits.size)
    for axis in range(bits.ndim):  # seed, batch row, head, query, key
        x = np.moveaxis(bits, axis, 0)
        product = x[1:] * x[:-1]
        assert abs(product.mean()) < 5 / np.sqrt(product.size), axis
    rows = bits.mean(-1).ravel() * np.sqrt(shape[2])  # each row drops as many
    assert abs(rows.std() - 1) < 0.05


def test_expected_output_is_that_without_dropout():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(1, 6, 2, 4)), jnp.float32) for _ in range(3)]

    @jax.jit
    @jax.vmap
    def run(seed):
        return attend(*arrays, dropout_rate=0.2, dropout_seed=seed)

    outputs = run(jnp.arange(4000, dtype=jnp.uint32))
    error = np.asarray(outputs.std(0)) / np.sqrt(len(outputs))
    assert (np.abs(outputs.mean(0) - attend(*arrays)) < 5 * error + 1e-6).all()


@pytest.mark.parametrize("implementation", ["blockwise", CPU])
def test_a_trial_in_a_group_drops_what_it_does_alone(implementation):
    """`jax.vmap` over seeds, and slopes with them: the same bits as one by one."""
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 9, 2, 4)), jnp.float32) for _ in range(3)]

    def run(seed, slopes):
        def number(*arrays):
            out = attend(
                *arrays,
                alibi_slopes=slopes,
                dropout_rate=0.4,
                dropout_seed=seed,
                implementation=implementation,
            )
            return (out**2).sum(), out

        return jax.grad(number, (0, 1, 2), has_aux=True)(*arrays)

    seeds, slopes = jnp.uint32([5, 6]), jnp.asarray(rng.random((2, 2)), jnp.float32)
    group = jax.jit(jax.vmap(run))(seeds, slopes)
    for trial in range(2):
        alone = jax.jit(run)(seeds[trial], slopes[trial])
        for x, y in zip(*map(jax.tree.leaves, (group, alone)), strict=True):
            np.testing.assert_allclose(x[trial], y, atol=2e-6)
    assert (group[1][0] != group[1][1]).mean() > 0.9


def test_statistics_and_residual_know_nothing_of_dropout():
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 9, 2, 4)), jnp.float32) for _ in range(3)]
    told = {"return_residual": True, "return_statistics": True}
    plain, *wanted = attend(*arrays, **told)
    out, *found = attend(*arrays, **told, dropout_rate=0.5, dropout_seed=0)
    assert (out != plain).any()
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(x, y)


def test_row_keys_of_a_shard_are_those_of_the_whole():
    """A function of the seed and three indices: a larger batch begins like a small."""
    keys = dropout.row_keys(jnp.int32(3), 4, 5, 6)
    np.testing.assert_array_equal(
        keys[:2, :3, :4], dropout.row_keys(jnp.int32(3), 2, 3, 4)
    )
    assert np.unique(keys).size == keys.size


def test_slopes_have_a_gradient_by_the_reference_alone():
    arrays = [jnp.ones((1, 3, 2, 4))] * 3

    def slope(implementation):
        def number(slopes):
            return attend(
                *arrays, alibi_slopes=slopes, implementation=implementation
            ).sum()

        return jax.grad(number)(jnp.ones(2))

    assert slope("reference").shape == (2,)
    with pytest.raises(NotImplementedError, match="no gradient by alibi_slopes"):
        slope("blockwise")


@pytest.mark.parametrize("implementation", ["xla", "cudnn"])
def test_what_jax_nn_lacks_names_the_argument(implementation):
    arrays = [jnp.ones((1, 3, 2, 4))] * 3
    with pytest.raises(NotImplementedError, match="takes no dropout_rate"):
        attend(*arrays, dropout_rate=0.1, dropout_seed=0, implementation=implementation)
    with pytest.raises(NotImplementedError, match="takes no alibi_slopes"):
        attend(*arrays, alibi_slopes=jnp.ones(2), implementation=implementation)
