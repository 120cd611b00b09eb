"""Talking heads by hand; rows that see nothing, and mixes that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from headcount.attention import dot_product_attention, talking_heads_attention
from headcount.attention import talking_heads_weights as weights_of

N = 4
EYE = {"logits_mix": jnp.eye(N), "weights_mix": jnp.eye(N)}


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


ARRAYS = normal(0, 2, 3, N, 5), normal(1, 2, 4, N, 5), normal(2, 2, 4, N, 5)


def test_bias_masks_and_gate_stand_where_they_are_said_to():
    """By NumPy: bias and mask between the mixes, the mask once more, the gate last."""
    query, key, value = ARRAYS[0], ARRAYS[1][:, :, :2], ARRAYS[2][:, :, :2]
    before, after = (normal(seed, N, N) for seed in (3, 4))
    bias, gate = normal(5, 2, N, 3, 4), normal(6, 2, N)
    mask = np.random.default_rng(7).random((2, N, 3, 4)) < 0.6
    mask[..., 0] = True
    keys, values = (np.repeat(np.float64(x), 2, axis=2) for x in (key, value))
    logits = np.einsum("btnh,bsnh->bnts", np.float64(query), keys) / np.sqrt(5)
    logits = np.einsum("bnts,nm->bmts", logits, before) + bias
    weights = scipy.special.softmax(np.where(mask, logits, -np.inf), -1)
    weights = np.einsum("bnts,nm->bmts", weights, after) * mask
    wanted = np.einsum("bnts,bsnv->btnv", weights, values) * gate[:, None, :, None]
    mixes = {"logits_mix": before, "weights_mix": after}
    arguments = {"bias": bias, "mask": jnp.asarray(mask)} | mixes
    found = weights_of(query, key, **arguments)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-5)
    out = talking_heads_attention(query, key, value, **arguments, head_gate=gate)
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_a_bias_of_minus_infinity_hides(causal):
    """A row all along: zeros and no gradient, as of `dot_product_attention`."""
    bias = jnp.zeros((3, 4)).at[1].set(-jnp.inf).at[2, 0].set(-jnp.inf)

    def run(attend, **mixes):
        def loss(arrays):
            out = attend(*arrays, bias, is_causal=causal, **mixes)
            return (out**2).sum(), out

        return jax.jit(jax.grad(loss, has_aux=True))(ARRAYS)

    found = run(talking_heads_attention, **EYE)
    wanted = run(dot_product_attention, implementation="reference")
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert not found[1][:, 1].any()
    weights = weights_of(*ARRAYS[:2], bias, is_causal=causal, **EYE)
    assert not weights[:, :, 1].any()

    def of_mix(mix):
        return (weights_of(*ARRAYS[:2], bias, **EYE | {"logits_mix": mix}) ** 2).sum()

    assert np.isfinite(jax.grad(of_mix)(EYE["logits_mix"])).all()


def test_dropout_drops_what_it_drops_without_mixes():
    drop = {"dropout_rate": 0.4, "dropout_seed": 5}
    found = talking_heads_attention(*ARRAYS, **EYE, **drop)
    wanted = dot_product_attention(*ARRAYS, **drop, implementation="reference")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found != talking_heads_attention(*ARRAYS, **EYE)).mean() > 0.5


@pytest.mark.parametrize("name", EYE)
@pytest.mark.parametrize("shape", [(N, 1), (1, N), (N, 8), (N, 2), (2, N, N), ()])
def test_a_mix_of_another_shape_is_refused(name, shape):
    mixes = EYE | {name: jnp.ones(shape)}
    for function, arrays in (
        (talking_heads_attention, ARRAYS),
        (weights_of, ARRAYS[:2]),
    ):
        with pytest.raises(ValueError, match=rf"{name} must have the shape N N = \(4"):
            function(*arrays, **mixes)
