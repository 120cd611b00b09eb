"""The TPU kernels, interpreted on the CPU, against the reference.

With blocks of 128, so that a few hundred tokens fill several. How the kernels compile
for a TPU is in tests/compilers/test_tpu.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount import attention
from headcount.attention import masks
from headcount.attention.kernels import tpu
from tests.attention_cases import allowed, check, ids, lengths, normal
from tests.marks import slow_but

TPU = "tpu_interpret"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tpu, "FORWARD_TILES", (128, 128))
    monkeypatch.setattr(tpu, "BACKWARD_TILES", (128, 128))


def inputs(T, S, N=2, K=1, H=16, V=24, B=2, dtype=jnp.float32):
    rng = np.random.default_rng(T)
    sizes = ((B, T, N, H), (B, S, K, H), (B, S, K, V))
    return tuple(normal(rng, *size).astype(dtype) for size in sizes)


def run(implementation, arrays, **arguments):
    """Output, log-sum-exp, and the gradients of a number made of both."""
    rng = np.random.default_rng(0)
    B, T, N, _ = arrays[0].shape
    weights = normal(rng, B, T, N, arrays[2].shape[-1]), normal(rng, B, T, N)

    def loss(arrays):
        out, lse = attention.dot_product_attention(
            *arrays, implementation=implementation, return_residual=True, **arguments
        )
        lse = jnp.where(lse > 0.5 * masks.EMPTY, lse, 0)
        total = (out.astype(jnp.float32) * weights[0]).sum() + (lse * weights[1]).sum()
        return total, (out, lse)

    gradients, outcomes = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return *outcomes, *gradients


def assert_close(got, want, dtype="float32"):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.shape == y.shape
        check({"outcome": x}, {"outcome": y}, dtype)


CASES = {
    "causal": (inputs(300, 300), {"is_causal": True}),
    "window": (inputs(200, 390, K=2), {"local_window_size": (150, 20)}),
    "lengths": (inputs(260, 390), {"query_seq_lengths": [200, 0]}),
    "segments": (inputs(390, 260), {}),
    "mask": (inputs(200, 140), {}),
    "bias": (inputs(140, 200), {}),
    "bfloat16": (inputs(260, 260, dtype=jnp.bfloat16), {"is_causal": True}),
    "H = 256": (inputs(130, 130, H=256, V=8, N=1), {}),
}


def case(name):
    arrays, arguments = CASES[name]
    rng = np.random.default_rng(1)
    B, T, N, _ = arrays[0].shape
    S = arrays[1].shape[1]
    arguments = {
        x: jnp.int32(y) if x.endswith("lengths") else y for x, y in arguments.items()
    }
    if name == "lengths":
        arguments["key_value_seq_lengths"] = lengths(rng, B, S)
    if name == "segments":
        arguments["query_segment_ids"] = ids(rng, B, T)
        arguments["key_value_segment_ids"] = ids(rng, B, S)
    if name == "mask":
        arguments["mask"] = allowed(rng, 1, N, T, S)
    if name == "bias":
        arguments["bias"] = normal(rng, B, 1, T, S)
    return arrays, arguments


@pytest.mark.parametrize("name", slow_but(["segments", "bias", "H = 256"], CASES))
def test_values_and_gradients(name):
    arrays, arguments = case(name)
    got = run(TPU, arrays, **arguments)
    exact = tuple(x.astype(jnp.float32) for x in arrays)
    want = run("reference", exact, **arguments)
    assert_close(got, want, arrays[0].dtype.name)


def test_statistics():
    """Beside the output, in one kernel, and alone."""
    arrays, arguments = case("segments")

    def compiled(function, implementation, *arrays, **options):
        call = functools.partial(function, implementation=implementation, **options)
        return jax.jit(call)(*arrays, **arguments)

    got, want = (
        compiled(attention.dot_product_attention, x, *arrays, return_statistics=True)
        for x in (TPU, "reference")
    )
    assert_close(got, want)
    assert_close(compiled(attention.head_statistics, TPU, *arrays[:2]), want[1])


@pytest.mark.slow
def test_infinite_bias_is_a_mask():
    query, key, value = inputs(20, 150)
    mask = allowed(np.random.default_rng(0), 2, 1, 20, 150).at[0, :, 3].set(False)
    lows = jnp.array([-jnp.inf, jnp.finfo(jnp.float32).min])
    bias = jnp.where(mask, 0.0, lows[:, None, None, None])
    got = run(TPU, (query, key, value), bias=bias)
    assert_close(got, run("reference", (query, key, value), mask=mask))


@pytest.mark.slow
def test_queries_that_fill_up_a_block_give_no_gradient():
    """Their logits are the bias, of which nothing says that it is below a maximum."""
    arrays, bias = inputs(20, 150), jnp.full((1, 1, 1, 150), 100.0)
    got, want = (run(x, arrays, bias=bias) for x in (TPU, "reference"))
    assert_close(got, want)


@pytest.mark.slow
def test_gradients_where_the_log_sum_exp_is_large():
    """In its rounding log(150) is lost: by a bias, and by the products themselves."""
    query, key, value = inputs(20, 150)
    query, key = query.at[1].set(1e4), key.at[1].set(-1e4)
    bias = jnp.zeros((2, 1, 20, 1)).at[0, :, 2].set(-1e9)
    got, want = (run(x, (query, key, value), bias=bias) for x in (TPU, "reference"))
    for b in range(2):  # lest the one's large gradients hide the other's
        assert_close([x[b] for x in got], [x[b] for x in want])


@pytest.mark.slow
def test_x64_mode():
    with jax.enable_x64(True):
        arrays, ids = inputs(20, 20, N=4, K=2), jnp.ones((2, 20), jnp.int32)
        segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
        got, want = (
            run(x, arrays, is_causal=True, **segments) for x in (TPU, "reference")
        )
    assert_close(got, want)


def poisoned(array, *blocks):
    for start, stop in blocks:
        array = array.at[:, start:stop].set(jnp.nan)
    return array


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window", "segments", "lengths"])
def test_blocks_ruled_out_are_skipped(name):
    """What is not computed cannot spread a NaN, which a weight of 0 would not stop."""
    query, key, value = inputs(384, 384)
    third = jnp.broadcast_to(jnp.arange(384) // 128 + 1, (2, 384))
    # The middle block of queries sees the middle block of keys, and these besides.
    arguments, dead_keys, dead_queries = {
        "causal": ({"is_causal": True}, [(256, 384)], [(0, 128)]),
        "window": (
            {"local_window_size": (127, 0)},
            [(256, 384)],
            [(0, 128)],
        ),
        "segments": (
            {"query_segment_ids": third, "key_value_segment_ids": third},
            [(0, 128), (256, 384)],
            [(0, 128), (256, 384)],
        ),
        "lengths": (
            {
                "query_seq_lengths": jnp.int32([256, 256]),
                "key_value_seq_lengths": jnp.int32([256, 256]),
            },
            [(256, 384)],
            [(256, 384)],
        ),
    }[name]
    attend = functools.partial(
        attention.dot_product_attention, implementation=TPU, **arguments
    )
    middle = slice(128, 256)

    @jax.jit
    def values_and_gradients(query, key, value, out_gradient):
        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(out_gradient)

    ones = jnp.ones((*query.shape[:3], value.shape[3]))
    poison = poisoned(value, *dead_keys)
    out, query_gradient, *_ = values_and_gradients(query, key, poison, ones)
    assert np.isfinite(out[:, middle]).all()
    assert np.isfinite(query_gradient[:, middle]).all()

    poison = poisoned(ones, *dead_queries)
    _, _, *gradients = values_and_gradients(query, key, value, poison)
    for gradient in gradients:
        assert np.isfinite(gradient[:, middle]).all()


@pytest.mark.parametrize("mapped", slow_but(["queries"], ["all", "queries", "twice"]))
def test_vmap_is_one_kernel(mapped):
    """Trials, with segments of their own, run as one kernel: not one after another."""
    rng = np.random.default_rng(2)
    R, B, T, S, N, H = 3, 2, 40, 70, 2, 8
    query, key, value = (normal(rng, R, B, size, N, H) for size in (T, S, S))
    segments = ids(rng, R * B, T).reshape(R, B, T)
    others = ids(rng, R * B, S).reshape(R, B, S)
    axes = (0, 0, 0, 0, 0)
    if mapped == "queries":
        key, value, others, axes = key[0], value[0], others[0], (0, None, None, 0, None)

    def gradients(implementation):
        def one(query, key, value, segments, others):
            arguments = {
                "query_segment_ids": segments,
                "key_value_segment_ids": others,
            }
            return run(implementation, (query, key, value), **arguments)

        call = jax.vmap(one, in_axes=axes)
        return jax.vmap(call) if mapped == "twice" else call

    arrays = query, key, value, segments, others
    if mapped == "twice":
        arrays = tuple(jnp.stack([x, x[::-1]]) for x in arrays)
    traced = jax.jit(gradients(TPU)).trace(*arrays)
    got = traced.lower().compile()(*arrays)
    assert_close(got, jax.jit(gradients("reference"))(*arrays))
    text = str(traced.jaxpr)
    for kernel in ("forward", "query_gradient", "key_value_gradient"):
        assert f"attention_{kernel}" in text
    assert "while[" not in text and "scan[" not in text


@pytest.mark.slow
def test_checkpoint():
    arrays = inputs(40, 40)

    def loss(arrays):
        return attention.dot_product_attention(*arrays, implementation=TPU).sum()

    got = jax.jit(jax.grad(jax.checkpoint(loss)))(arrays)
    assert_close(got, jax.jit(jax.grad(loss))(arrays))


@pytest.mark.slow
def test_shard_map():
    arrays = inputs(40, 50)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))

    def gradients(*arrays):
        def loss(arrays):
            return attention.dot_product_attention(*arrays, implementation=TPU).sum()

        return jax.grad(loss)(arrays)

    sharded = jax.shard_map(
        gradients,
        mesh=mesh,
        in_specs=jax.P("data"),
        out_specs=jax.P("data"),
        check_vma=False,  # Pallas's interpreter does not support the check
    )
    assert_close(jax.jit(sharded)(*arrays), jax.jit(gradients)(*arrays))


def test_refusals():
    query, key, value = inputs(20, 20)
    attend = functools.partial(attention.dot_product_attention, implementation=TPU)

    def loss(query):
        return (attend(query, key, value) ** 2).sum()

    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.grad(lambda query: jax.grad(loss)(query).sum())(query)
    bias = jnp.zeros((1, 1, 20, 20))
    with pytest.raises(NotImplementedError, match="gradient .* bias"):
        jax.grad(lambda bias: attend(query, key, value, bias).sum())(bias)
    with pytest.raises(
        NotImplementedError, match="takes query, key and value in .* not in float16"
    ):
        attend(*(x.astype(jnp.float16) for x in (query, key, value)))
    with pytest.raises(
        NotImplementedError, match="query and value .* up to 256, got 300"
    ):
        attend(query, key, jnp.zeros((2, 20, 1, 300)))
