"""Every feature of what is compiled for a CPU, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CPU,
    FEATURES,
    KERNEL_FEATURES,
    check,
    differentiate,
    everything,
    expected,
    make,
    normal,
    statistics,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headcount import attention
from headcount.attention import masks
from headcount.attention.kernels import blockwise
from tests.marks import slow_but


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in few tokens: block by block, padded, visited or skipped."""
    monkeypatch.setattr(blockwise, "SHORT", 0)
    monkeypatch.setattr(blockwise, "LONG", (4, 5))
    monkeypatch.setattr(blockwise, "SHARED", (5, 3))


@pytest.mark.parametrize(
    "feature",
    slow_but(
        ["nothing", "V > H", "lengths", "segments", "dropout", "head_gate", "sink"],
        FEATURES,
    ),
)
def test_one_block(feature):
    """Short rows: values, gradients and statistics."""
    check(everything("blockwise", *make(feature)), expected(feature))


@pytest.mark.parametrize("feature", KERNEL_FEATURES)
def test_many_blocks(feature, small_blocks):
    """Rows of several blocks: values, gradients and statistics."""
    check(everything("blockwise", *make(feature)), expected(feature))


@pytest.mark.parametrize(
    "feature",
    slow_but(
        ["causal", "dropout of segments"],
        ["causal", "window", "lengths", "segments", "dropout of segments"]
        + ["alibi_slopes"],
    ),
)
def test_many_blocks_of_all_heads_at_once(feature, small_blocks, monkeypatch):
    """As accelerators compute them, which also take more queries in a block."""
    monkeypatch.setattr(blockwise, "platform", lambda: "gpu")
    monkeypatch.setattr(blockwise, "LARGEST", 10)
    check(everything("blockwise", *make(feature)), expected(feature))


@pytest.mark.parametrize("feature", FEATURES)
def test_jax_nn(feature):
    """The reference and "xla" mean what jax.nn means."""
    inputs, arguments = make(feature)
    if inputs[0].shape[-1] != inputs[2].shape[-1]:
        with pytest.raises(NotImplementedError, match="needs query and value"):
            differentiate("xla", inputs, arguments, residual=False)
        return
    for name in ("alibi_slopes", "dropout_rate"):
        if name in arguments:
            with pytest.raises(NotImplementedError, match=f"takes no {name}"):
                differentiate("xla", inputs, arguments, residual=False)
            return
    if "sink" in arguments:
        attend = functools.partial(
            attention.dot_product_attention, implementation="xla", **arguments
        )
        with pytest.raises(NotImplementedError, match="no gradient .* sink"):
            jax.eval_shape(jax.grad(lambda query, *x: attend(query, *x).sum()), *inputs)
        out, lse = jax.jit(functools.partial(attend, return_residual=True))(*inputs)
        check({"out": out, "lse": lse}, expected(feature))
        return
    want = expected(feature)
    got = everything("xla", inputs, arguments, residual=False)
    # Without the residual's gradient, the reference's differs too.
    plain = everything("reference", inputs, arguments, residual=False)
    check(got, plain)
    extra = {"head_gate", "query_segment_ids", "key_value_segment_ids"}
    if not extra & set(arguments):
        attend = functools.partial(jax.nn.dot_product_attention, **arguments)
        theirs = jax.jit(attend)(*inputs)
        seen = (want["lse"] > 0.5 * masks.EMPTY)[..., None]  # theirs: the values' mean
        check({"out": jnp.where(seen, theirs, 0)}, want)


@pytest.mark.parametrize("feature", ["causal", "segments"])
def test_bfloat16(feature, small_blocks):
    inputs, arguments = make(feature, jnp.bfloat16)
    got = everything("blockwise", inputs, arguments)
    assert got["out"].dtype == got["gradient of key"].dtype == jnp.bfloat16
    assert got["lse"].dtype == jnp.float32
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    check(got, everything("reference", exact, arguments), jnp.bfloat16)


def test_float64(small_blocks):
    """The output has its precision; log-sum-exp and statistics are float32."""
    with jax.enable_x64(True):
        inputs, arguments = make("causal", jnp.float64)
        got = everything("blockwise", inputs, arguments)
        want = everything("reference", inputs, arguments)
        alone = jax.jit(lambda x: statistics("blockwise", x, arguments))(inputs)
    check(got, want)
    np.testing.assert_allclose(got["out"], want["out"], atol=1e-13)
    for name, x in got.items():
        assert x.dtype == want[name].dtype, name
    assert {x.dtype for x in alone.values()} == {jnp.dtype("float32")}


def test_default_block_sizes():
    """Long rows as users have them, across the borders of the real blocks."""
    shape = (1, 300, 1100, 2, 1, 16, 8)
    inputs, arguments = make("everything", shape=shape)
    got = jax.jit(lambda x: differentiate("blockwise", x, arguments))(inputs)
    check(got, everything("reference", inputs, arguments))


@pytest.mark.slow
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 2, *[st.integers(1, 2)] * 3),
    blocks=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    window=st.none() | st.tuples(st.integers(0, 4), st.integers(0, 4)),
    features=st.sets(
        st.sampled_from(["lengths", "segments", "mask of B N T S", "mask of N T"])
    ),
    is_causal=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16]),
)
@settings(max_examples=6, deadline=None, derandomize=True)
def test_any_shape_and_mask(sizes, blocks, window, features, is_causal, dtype):
    """Whatever masks meet: values, gradients and statistics are the reference's."""
    T, S, B, K, G = sizes
    shape = (B, T, S, K * G, K, 4, 3)
    inputs, _ = make("nothing", dtype, shape)
    arguments = {"is_causal": is_causal, "local_window_size": window}
    for feature in sorted(features):
        arguments |= make(feature, shape=shape)[1]
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "SHORT", 0)
        patch.setattr(blockwise, "LONG", blocks)
        got = everything("blockwise", inputs, arguments)
        alone = jax.jit(lambda x: statistics("blockwise", x, arguments))(inputs)
        want = everything("reference", exact, arguments)
    check(got, want, dtype)
    check(alone, want, dtype)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_lengths_of_few_bits(dtype):
    """The end, 300, is none of their numbers: as an int8 it would be 44."""
    inputs, _ = make("nothing", shape=(1, 2, 300, 1, 1, 4, 4))

    def of(dtype):
        lengths = {"key_value_seq_lengths": jnp.array([100], dtype)}
        return attention.dot_product_attention(
            *inputs, implementation="reference", **lengths
        )

    np.testing.assert_array_equal(of(dtype), of(jnp.int32))


def test_statistics_of_the_full_map():
    """Their definitions, from `attention_weights`, by NumPy in float64."""
    inputs, arguments = make("segments")
    weights = np.float64(attention.attention_weights(*inputs[:2], **arguments))
    real = weights.sum(-1).round(6).sum(-1)  # of each row 1 or 0
    T, S = weights.shape[2:]
    offset = np.arange(S) - np.arange(T)[:, None]
    logs = np.log(np.where(weights > 0, weights, 1))
    want = {
        "entropy": -(weights * logs).sum((-2, -1)),
        "confidence": weights.max(-1).sum(-1),
        "distance": (weights * abs(offset)).sum((-2, -1)),
        "previous": weights[..., offset == -1].sum(-1),
        "current": weights[..., offset == 0].sum(-1),
        "following": weights[..., offset == 1].sum(-1),
    }
    want = {name: total / real for name, total in want.items()}
    query, key = (np.float64(x) for x in inputs[:2])
    key = np.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = np.einsum("BTNH,BSNH->BNTS", query, key) / query.shape[-1] ** 0.5
    want["max_logit"] = np.where(weights > 0, logits, -np.inf).max((-2, -1))
    for implementation in ("reference", "blockwise", None):
        found = jax.jit(functools.partial(statistics, implementation))
        check(found(inputs, arguments), want)


@pytest.mark.parametrize(
    "implementation", ["reference", "blockwise", CPU, "tpu_interpret"]
)
def test_statistics_are_nan_where_logits_are(implementation):
    """So that whoever watches them sees it; a head whose logits are finite is not."""
    rng = np.random.default_rng(0)
    query, key, value = (normal(rng, 1, 9, 2, 8) for _ in range(3))
    key = key.at[0, 5, 1].set(jnp.nan)
    attend = functools.partial(
        attention.dot_product_attention,
        implementation=implementation,
        is_causal=True,
        return_residual=True,
        return_statistics=True,
    )
    out, lse, seen = jax.jit(attend)(query, key, value)
    assert jnp.isnan(out[0, 5:, 1]).all() and jnp.isnan(lse[0, 5:, 1]).all()
    for field in seen:
        assert jnp.isnan(field).tolist() == [[False, True]]


def test_extreme_logits():
    """Large logits, and a bias of -inf, give neither NaN nor a wrong maximum."""
    rng = np.random.default_rng(0)
    query, key, value = (30 * normal(rng, 1, 9, 2, 8) for _ in range(3))
    bias = jnp.zeros((9, 9)).at[2].set(-jnp.inf).at[:, 4].set(-jnp.inf)
    arguments = {"bias": jnp.broadcast_to(bias, (1, 2, 9, 9))}
    inputs = (query, key, value / 30)
    got = everything("blockwise", inputs, arguments)
    check(got, everything("reference", inputs, arguments))
    assert not got["out"][:, 2].any()
    xla = functools.partial(attention.dot_product_attention, implementation="xla")
    check({"out": jax.jit(xla)(*inputs, **arguments)}, {"out": got["out"]})
    slopes = jax.jit(jax.grad(lambda bias: (xla(*inputs, bias=bias) ** 2).sum()))
    assert jnp.isfinite(slopes(arguments["bias"])).all()
