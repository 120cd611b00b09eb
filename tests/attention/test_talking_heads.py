"""Talking heads by hand; rows that see nothing, and mixes that do not fit."""

from functools import partial

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
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("T, S", [(150, 140), (65, 200), (600, 130)])
def test_blocks_of_a_causal_map_equal_the_whole_map(T, S):
    """Values, gradients, and all that is cut up with the map."""
    query, key, value = (normal(i, 2, n, N, 3) for i, n in enumerate((T, S, S)))
    mixes = {"logits_mix": normal(3, N, N), "weights_mix": normal(4, N, N)}
    segments = {
        "query_segment_ids": 1 + jnp.tile(jnp.arange(T) // 40, (2, 1)),
        "key_value_segment_ids": 1 + jnp.tile(jnp.arange(S) // 40, (2, 1)),
    }
    masks = segments | {
        "mask": jnp.arange(S) % 7 != 3,
        "bias": normal(5, N, T, 1),
        "alibi_slopes": jnp.array([0.5, 0.25, 0.0, 1.0]),
        "is_causal": True,
    }

    def in_blocks(query, key, value, mixes, implementation=None):
        arguments = masks | mixes | {"implementation": implementation}
        return talking_heads_attention(query, key, value, **arguments)

    whole = partial(in_blocks, implementation="reference")
    arrays = query, key, value, mixes
    weights = weights_of(query, key, **masks, **mixes)
    by_hand = jnp.einsum("bnts,bsnv->btnv", weights, value)
    np.testing.assert_allclose(whole(*arrays), by_hand, rtol=1e-4, atol=1e-5)
    cotangent = normal(6, *by_hand.shape)

    @partial(jax.jit, static_argnums=0)
    def value_and_gradients(function, arrays):
        value, backward = jax.vjp(function, *arrays)
        return value, backward(cotangent)

    (found, ours), (wanted, theirs) = (
        value_and_gradients(function, arrays) for function in (in_blocks, whole)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    for x, y in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_dropout_in_blocks_drops_what_it_drops_in_the_whole_map():
    arrays = [normal(i, 1, 150, N, 3) for i in range(3)]
    drop = {"dropout_rate": 0.4, "dropout_seed": 5, "is_causal": True}
    found = talking_heads_attention(*arrays, **EYE, **drop)
    wanted = dot_product_attention(*arrays, **drop, implementation="reference")
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_dropout_drops_what_it_drops_without_mixes():
    drop = {"dropout_rate": 0.4, "dropout_seed": 5}
    found = talking_heads_attention(*ARRAYS, **EYE, **drop)
    wanted = dot_product_attention(*ARRAYS, **drop, implementation="reference")
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert (found != talking_heads_attention(*ARRAYS, **EYE)).mean() > 0.5


@pytest.mark.parametrize(
    "name, error, told",
    [
        ("typo", ValueError, "implementation must be one of reference"),
        ("cudnn", NotImplementedError, "'cudnn' has no talking heads; use None"),
        ("blockwise", NotImplementedError, "'blockwise' has no talking heads"),
    ],
)
def test_a_named_implementation_runs_or_fails(name, error, told):
    with pytest.raises(error, match=told):
        talking_heads_attention(*ARRAYS, **EYE, implementation=name)
    talking_heads_attention(*ARRAYS, **EYE, implementation="reference")


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
