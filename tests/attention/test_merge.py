"""Merge rules: the identities that define them, their gradients, their parameters."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from headcount.attention.merge import MERGE_RULES, entry

B, T, N, V, D = 2, 3, 4, 5, 6
SIZES = {"N": N, "V": V, "D": D}
SETTINGS = {
    "mixture": {"mixture_heads": 2},
    "shared_mixture": {"mixture_heads": 2, "mixture_shared": 1},
}


def normal(shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


def parameters(rule):
    return {
        name: normal([SIZES[letter] for letter in letters.split()], seed)
        for seed, (name, letters) in enumerate(MERGE_RULES[rule].shapes.items(), 2)
    }


HEADS, X = normal((B, T, N, V), 0), normal((B, T, D), 1)
KERNEL, SHARED = parameters("concat")["kernel"], parameters("mean")["kernel"]


def merge(rule, **settings):
    settings = parameters(rule) | SETTINGS.get(rule, {}) | settings
    return MERGE_RULES[rule].function(HEADS, X, **settings)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_concat_is_one_projection_of_the_concatenation():
    close(merge("concat"), HEADS.reshape(B, T, N * V) @ KERNEL.reshape(N * V, D))


def test_scaled_at_zero_is_concat_bit_for_bit():
    for dtype in (jnp.float32, jnp.bfloat16):
        heads, x, kernel = (a.astype(dtype) for a in (HEADS, X, KERNEL))
        scaled, concat = (MERGE_RULES[rule].function for rule in ("scaled", "concat"))
        at_zero = scaled(heads, x, kernel=kernel, scale=jnp.zeros(N, dtype))
        np.testing.assert_array_equal(at_zero, concat(heads, x, kernel=kernel))


def test_scaled_by_hand():
    params = {name: np.float64(p) for name, p in parameters("scaled").items()}
    out = np.zeros((B, T, D))
    for n in range(N):
        out += (1 + params["scale"][n]) * np.float64(HEADS[:, :, n]) @ KERNEL[n]
    close(merge("scaled"), out)


def test_a_small_scale_counts_in_bfloat16():
    heads, x, kernel = jax.tree.map(jnp.bfloat16, (HEADS, X, KERNEL))
    rule = MERGE_RULES["scaled"].function
    found = [
        rule(heads, x, kernel=kernel, scale=jnp.full(N, a, jnp.bfloat16))
        for a in (0.0, 1 / 300)
    ]
    assert (found[0] != found[1]).any()


def test_weighted_and_dynamic_at_zero_are_mean():
    close(merge("weighted", logits=jnp.zeros(N)), merge("mean"))
    close(merge("dynamic", router=jnp.zeros((D, N))), merge("mean"))


def test_mean_is_concat_with_one_kernel():
    same = jnp.broadcast_to(SHARED / N, (N, V, D))
    close(merge("mean"), merge("concat", kernel=same))


def test_dynamic_with_one_token_is_weighted():
    logits = X[0, 0] @ parameters("dynamic")["router"]
    close(merge("dynamic")[0, 0], merge("weighted", logits=logits)[0, 0])


def test_gates_at_zero_halve_concat():
    close(merge("gated", gate=jnp.zeros((D, N))), merge("concat") / 2)
    closed = jnp.zeros((D, N, V))
    close(merge("gated_elementwise", gate=closed), merge("concat") / 2)


def test_gated_elementwise_with_one_gate_a_head_is_gated():
    gate = parameters("gated")["gate"]
    spread = jnp.broadcast_to(gate[..., None], (D, N, V))
    close(merge("gated_elementwise", gate=spread), merge("gated"))


def test_mixture_of_all_heads_at_zero_is_a_share_of_concat():
    even = merge("mixture", router=jnp.zeros((D, N)), mixture_heads=N)
    close(even, merge("concat") / N)


def test_mixture_of_one_is_the_best_head_alone():
    best = np.argmax(X @ parameters("mixture")["router"], axis=-1)
    assert len(np.unique(best)) > 1
    for b, t in np.ndindex(B, T):
        n = best[b, t]
        found = merge("mixture", mixture_heads=1)[b, t]
        close(found, HEADS[b, t, n] @ KERNEL[n])


@pytest.mark.slow
def test_the_router_of_a_mixture_of_one_learns():
    """As of Zhang et al. 2022: by the logarithm of the chosen head's share of all."""
    params = parameters("mixture")
    best = np.argmax(X @ params["router"], axis=-1)[..., None]

    def loss(router):
        return merge("mixture", router=router, mixture_heads=1).sum()

    def logarithms(router):
        worth = jnp.einsum("BTNV,NVD->BTN", HEADS, params["kernel"])
        shares = jax.nn.log_softmax(X @ router)
        return jnp.take_along_axis(worth * shares, best, axis=-1).sum()

    router = params["router"]
    close(jax.grad(loss)(router), jax.grad(logarithms)(router))
    assert np.isfinite(jax.grad(loss)(1e4 * router)).all()  # other shares are 0 there


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_mixture_by_hand(k):
    logits = np.float64(X @ parameters("mixture")["router"])
    out = np.zeros((B, T, D))
    for b, t in np.ndindex(B, T):
        chosen = np.argsort(-logits[b, t])[:k]
        shares = np.exp(logits[b, t, chosen])
        for n, share in zip(chosen, shares / shares.sum(), strict=True):
            out[b, t] += share * np.float64(HEADS[b, t, n]) @ np.float64(KERNEL[n])
    close(merge("mixture", mixture_heads=k), out)


def test_mixture_takes_exactly_k_where_all_are_equal():
    found = merge("mixture", router=jnp.zeros((D, N)), mixture_heads=2)
    close(found, jnp.einsum("BTNV,NVD->BTD", HEADS[:, :, :2], KERNEL[:2]) / 2)


def test_shared_mixture_of_all_heads_with_equal_routes_is_a_share_of_concat():
    half = {"mixture_shared": N // 2, "mixture_heads": N // 2}
    even = {"router": jnp.zeros((D, N)), "split": jnp.zeros(D)}
    close(merge("shared_mixture", **even, **half), merge("concat") / N)


@pytest.mark.parametrize("shared, k", [(1, 1), (1, 3), (2, 1)])
def test_shared_mixture_by_hand(shared, k):
    params = {name: np.float64(p) for name, p in parameters("shared_mixture").items()}
    out = np.zeros((B, T, D))
    for b, t in np.ndindex(B, T):
        x = np.float64(X[b, t])
        powers = np.exp(x @ params["router"])
        a = 1 / (1 + np.exp(-x @ params["split"]))
        on = a * powers[:shared] / powers[:shared].sum()
        routed = (1 - a) * powers[shared:] / powers[shared:].sum()
        routed[np.argsort(-routed)[k:]] = 0
        for n, weight in enumerate([*on, *routed]):
            out[b, t] += weight * np.float64(HEADS[b, t, n]) @ params["kernel"][n]
    close(merge("shared_mixture", mixture_shared=shared, mixture_heads=k), out)


@pytest.mark.parametrize("shared, k", [(0, 2), (4, 1), (2, 3), (1, 0)])
def test_shared_mixture_of_heads_that_are_not_there_is_refused(shared, k):
    with pytest.raises(ValueError, match="mixture_shared and mixture_heads .* N = 4"):
        merge("shared_mixture", mixture_shared=shared, mixture_heads=k)


@pytest.mark.parametrize("rule", [n for n, row in MERGE_RULES.items() if row.weights])
def test_weights_are_what_the_heads_are_multiplied_by(rule):
    row, params = MERGE_RULES[rule], parameters(rule)
    kernel = params.pop("kernel")
    settings = SETTINGS.get(rule, {})
    weights = np.float64(row.weights(X, **params, **settings))
    weights = weights if weights.ndim == 4 else weights[..., None]
    kernel = jnp.broadcast_to(kernel, (N, V, D))
    close(merge(rule), np.einsum("BTNV,NVD->BTD", HEADS * weights, kernel))


@pytest.mark.parametrize("rule", MERGE_RULES)
def test_parameters_of_another_shape_are_refused(rule):
    """Above all an axis of 1, which would be broadcast."""
    for name, array in parameters(rule).items():
        for axis in range(array.ndim):
            for other in (array.take(jnp.array([0]), axis), array.sum(axis)):
                match = rf"{name} of {rule} must .* = {re.escape(str(array.shape))}, "
                with pytest.raises(ValueError, match=match):
                    merge(rule, **{name: other})


def own(heads, x, *, kernel):
    return heads.max(2)  # B T V, not projected


@pytest.mark.parametrize(
    "shapes, match",
    [
        ({"kernel": "V D", "gate": "V Q"}, "rule own: the shape of gate .* 'V Q'"),
        ({"kernel": "VD"}, "rule own: the shape of kernel .* blanks, got 'VD'"),
        ({"weight": "V D"}, "rule own needs a parameter kernel"),
        ({"kernel": "V D", "gate": "N"}, "rule own must take .* argument 'gate'"),
    ],
)
def test_a_row_that_does_not_fit_its_function_is_refused(shapes, match):
    with pytest.raises(ValueError, match=match):
        entry(own, shapes)


def test_an_output_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"rule own must return .*\(2, 3, 6\).*3, 5"):
        entry(own, {"kernel": "V D"}).function(HEADS, X, kernel=SHARED)


@pytest.mark.parametrize("k", [-1, 0, N + 1])
def test_mixture_of_no_heads_or_more_than_there_are_is_refused(k):
    with pytest.raises(ValueError, match=f"must be from 1 to N = 4, got {k}"):
        merge("mixture", mixture_heads=k)


@pytest.mark.parametrize("rule", MERGE_RULES)
def test_gradients(rule):
    settings = SETTINGS.get(rule, {})
    function = MERGE_RULES[rule].function

    @jax.jit
    def merged(heads, x, params):
        heads, x, params = jax.tree.map(jnp.asarray, (heads, x, params))
        return function(heads, x, **params, **settings)

    with jax.enable_x64(True):
        arguments = jax.tree.map(jnp.float64, (HEADS, X, parameters(rule)))
        check_grads(merged, arguments, order=1, modes=["rev"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "rule",
    ["concat", "scaled", "gated", "gated_elementwise", "mixture", "shared_mixture"],
)
def test_a_head_at_zero_is_a_head_without_kernel(rule):
    settings = SETTINGS.get(rule, {})
    function, params = MERGE_RULES[rule].function, parameters(rule)
    gate = jnp.array([1.0, 0.0, 1.0, 1.0])[:, None]
    gone = params | {"kernel": params["kernel"] * gate[..., None]}
    close(
        function(HEADS * gate, X, **params, **settings),
        function(HEADS, X, **gone, **settings),
    )


def test_the_dtype_is_kept():
    for rule, row in MERGE_RULES.items():
        settings = SETTINGS.get(rule, {})
        heads, x, params = jax.tree.map(jnp.bfloat16, (HEADS, X, parameters(rule)))
        assert row.function(heads, x, **params, **settings).dtype == jnp.bfloat16
