"""Numbers near the ends of their types: gradients stay finite and exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import fuzz
from headcount.attention import attention_weights, dot_product_attention, masks
from tests.marks import slow_but


def inputs(T, dtype, N=2, H=16):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(1, T, N, H)), dtype) for _ in range(3)]


def gradients(implementation, arrays, cotangent):
    """By query, key, value and, if there is one, bias."""

    def attend(*arrays):
        return dot_product_attention(*arrays, implementation=implementation)

    def run(arrays):
        out, pullback = jax.vjp(attend, *arrays)
        return pullback(cotangent.astype(out.dtype))

    return jax.jit(run)(arrays)


@pytest.mark.parametrize("dtype, height", [(jnp.float32, 100), (jnp.float16, 12)])
def test_a_high_bias_that_padded_queries_share(dtype, height):
    """131 queries are padded to 132; the bias of all keys is too high for exp."""
    arrays = inputs(131, dtype)
    arrays.append(jnp.full((1, 1, 1, 131), height, dtype))
    found = gradients("blockwise", arrays, jnp.ones(arrays[0].shape))
    wanted = gradients("reference", arrays, jnp.ones(arrays[0].shape))
    relative, absolute = (1e-4, 1e-5) if dtype == jnp.float32 else (1e-2, 0.02)
    for x, y in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=relative, atol=absolute)
    assert np.isfinite(found[3]).all()  # a sum of what cancels: it is all rounding


@pytest.mark.parametrize("implementation", ["reference", "blockwise", "cpu"])
@pytest.mark.parametrize(
    "hidden",
    [
        {"is_causal": True},
        {"key_value_seq_lengths": [1]},
        {"mask": np.tri(2, dtype=bool)},
    ],
    ids=lambda hidden: next(iter(hidden)),
)
def test_a_hidden_logit_of_almost_the_largest_number_has_no_weight(
    implementation, hidden
):
    """The first query sees only the first key; its logit with the second is 3e38."""
    query = jnp.zeros((1, 2, 1, 2)).at[0, 0, 0, 0].set(1e19)
    key = jnp.zeros((1, 2, 1, 2)).at[0, 1, 0, 0].set(3e19)
    value = jnp.array([1.0, 5.0]).reshape(1, 2, 1, 1)
    out, lse = dot_product_attention(
        *(query, key, value),
        scale=1.0,
        implementation=implementation,
        return_residual=True,
        **hidden,
    )
    assert (out[0, 0, 0, 0], lse[0, 0, 0]) == (1, 0)


def test_float16_gradients_of_long_rows():
    """A cotangent of 1e-4 over 1,024 keys: each has less than float16 holds well."""
    arrays = inputs(1024, jnp.float16)
    cotangent = inputs(1024, jnp.float32)[1] * 1e-4
    found = gradients("blockwise", arrays, cotangent.astype(jnp.float16))
    wide = [x.astype(jnp.float32) for x in arrays]
    wanted = gradients("reference", wide, cotangent.astype(jnp.float16))
    for x, y in zip(found, wanted, strict=True):
        difference = jnp.linalg.norm(x.astype(jnp.float32) - y)
        assert difference < 0.005 * jnp.linalg.norm(y)


@pytest.mark.parametrize(
    "implementation",
    ["reference", "blockwise", "tpu_interpret"],
)
@pytest.mark.parametrize("share", slow_but([0.7], [1, 0.7, 0.5]))
def test_a_row_of_the_largest_numbers_sees_nothing(implementation, share):
    """A mask as others write it: a bias of some share of the type's least number."""
    least = share * float(jnp.finfo(jnp.float32).min)
    arrays = [*inputs(6, jnp.float32), jnp.zeros((1, 1, 6, 6)).at[:, :, 2].set(least)]
    out, lse = dot_product_attention(
        *arrays, implementation=implementation, return_residual=True
    )
    np.testing.assert_array_equal(np.abs(out).max((0, 2, 3)) > 0, np.arange(6) != 2)
    np.testing.assert_array_equal(lse[:, 2], np.float32(masks.EMPTY))
    assert not attention_weights(*arrays[:2], arrays[3])[:, :, 2].any()


@pytest.mark.parametrize("name, seed", [("reference", 332), ("blockwise", 327)])
def test_problems_that_the_fuzzer_found(name, seed):
    """Logits of 1e30, whose maximum XLA subtracted from what it had not rounded."""
    assert fuzz.differences(name, seed) == []
