"""Numbers near the ends of their types: gradients stay finite and exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import dot_product_attention


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
    precision = 1e-5 if dtype == jnp.float32 else 0.02
    for x, y in zip(found[:3], wanted[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=precision)
    assert np.isfinite(found[3]).all()  # a sum of what cancels: it is all rounding


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
