"""A sink by its definition: a softmax of one more logit, whose key has no value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import CPU

from headcount.attention import (
    attention_weights,
    dot_product_attention,
    head_statistics,
    masks,
)
from headcount.attention.statistics import from_weights, over_queries

B, T, S, N, K = 2, 5, 6, 4, 2


def normal(seed, *shape):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


ARRAYS = normal(0, B, T, N, 3), normal(1, B, S, K, 3), normal(2, B, S, K, 7)
SEEN = jnp.asarray(np.random.default_rng(3).random((B, N, T, S)) < 0.5)
SEEN = SEEN.at[:, :, 1].set(False)  # a query that sees nothing


def by_definition(query, key, value, sink, bias=0.0):
    """Weights, output and log-sum-exp, over the keys and, last, the sink."""
    key, value = (jnp.repeat(x, N // K, axis=2) for x in (key, value))
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key) / 3**0.5 + bias
    logits = jnp.where(SEEN, logits, -jnp.inf)
    sink = jnp.broadcast_to(jnp.reshape(sink, (-1, N, 1, 1)), (B, N, T, 1))
    logits = jnp.concatenate([logits, sink], -1)
    weights = jax.nn.softmax(logits, -1)[..., :-1]
    out = jnp.einsum("BNTS,BSNV->BTNV", weights, value)
    return weights, out, jax.nn.logsumexp(logits, -1).transpose(0, 2, 1)


@pytest.mark.parametrize("implementation", ["reference", "blockwise"])
@pytest.mark.parametrize("shape", [(N,), (B, N)])
def test_a_sink_is_one_more_logit(implementation, shape):
    """Values and all gradients, with a mask, groups, and a row that sees nothing."""
    arrays = *ARRAYS, 3 * normal(4, *shape), normal(5, B, N, T, S)
    out_weight, lse_weight = normal(6, B, T, N, 7), normal(7, B, T, N)
    seen = SEEN.any(-1).transpose(0, 2, 1)

    def ours(query, key, value, sink, bias):
        given = {"sink": sink, "bias": bias, "mask": SEEN}
        out, lse = dot_product_attention(
            *(query, key, value),
            **given,
            implementation=implementation,
            return_residual=True,
        )
        return attention_weights(query, key, **given), out, lse

    def outcomes(function):
        def total(arrays):
            weights, out, lse = function(*arrays)
            found = (out * out_weight).sum() + (weights**2).sum()
            found += jnp.where(seen, lse * lse_weight, 0).sum()
            return found, (weights, out, lse)

        return jax.jit(jax.grad(total, has_aux=True))(arrays)

    gradients, (weights, out, lse) = outcomes(ours)
    wanted, (*values, wanted_lse) = outcomes(by_definition)
    for x, y in zip((weights, out, *gradients), (*values, *wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse[seen], wanted_lse[seen], rtol=1e-5)
    np.testing.assert_array_equal(lse[~seen], np.float32(masks.EMPTY))
    assert not out[:, 1].any() and abs(gradients[3]).min() > 1e-3


@pytest.mark.parametrize("implementation", ["reference", "blockwise", CPU, "xla"])
def test_the_ends_of_a_sink(implementation):
    """At -inf there is none, at the largest number it takes all; neither gives NaN."""

    query, key, _ = ARRAYS
    given = {"mask": SEEN, "implementation": implementation}

    def attend(sink):
        return dot_product_attention(query, key, key, sink=sink, **given)

    @jax.jit
    @jax.vmap
    def outcomes(sink):
        out, pullback = jax.vjp(attend, jnp.full(N, sink))
        return out, pullback(jnp.ones_like(out))

    ends = jnp.asarray([-np.inf, np.finfo(np.float32).max])
    out, (gradient,) = outcomes(ends)
    np.testing.assert_allclose(out[0], jax.jit(attend)(None), rtol=1e-6)
    assert not out[1].any() and not gradient.any()


def test_statistics_are_of_what_the_sink_leaves():
    @jax.jit
    def outcomes(query, key, value):
        given = {"mask": SEEN, "sink": 3 * normal(4, N)}
        weights = attention_weights(query, key, **given)
        total = weights.sum(-1, keepdims=True)
        wanted = over_queries(
            from_weights(
                weights / jnp.maximum(total, 1e-30), jnp.zeros(total.shape[:3])
            )
        )
        _, found = dot_product_attention(
            *(query, key, value), **given, return_statistics=True
        )
        return total, wanted, found, head_statistics(query, key, mask=SEEN)

    total, wanted, *both = outcomes(*ARRAYS)
    assert total.max() < 0.999
    for found in both:
        for x, y in zip(found[:-1], wanted[:-1], strict=True):  # weights, not logits
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


def test_a_sink_goes_with_a_gate_and_without_a_batch():
    sink, gate = normal(4, N), normal(5, N)

    @jax.jit
    def outcomes(arrays):
        first = [x[0] for x in arrays]
        return (
            dot_product_attention(*arrays, sink=sink),
            dot_product_attention(*arrays, sink=sink, head_gate=gate),
            dot_product_attention(*first, sink=sink),
            attention_weights(*arrays[:2], sink=sink),
            attention_weights(*first[:2], sink=sink),
        )

    plain, gated, first, weights, first_weights = outcomes(ARRAYS)
    np.testing.assert_allclose(gated, plain * gate[:, None], rtol=1e-5)
    np.testing.assert_allclose(first, plain[0], rtol=1e-5)
    np.testing.assert_allclose(first_weights, weights[0], rtol=1e-5)


@pytest.mark.parametrize("sink", [jnp.ones(3), jnp.ones((3, N)), 0.0, jnp.ones(N) * 1j])
def test_a_sink_of_another_shape_is_refused(sink):
    for function, arrays in (
        (dot_product_attention, ARRAYS),
        (attention_weights, ARRAYS[:2]),
    ):
        with pytest.raises(ValueError, match="sink must have one number per head"):
            function(*arrays, sink=sink)
