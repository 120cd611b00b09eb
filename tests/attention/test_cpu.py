"""The kernels for CPUs, compiled on this machine, against the reference."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    KERNEL_FEATURES,
    check,
    everything,
    expected,
    make,
    needs_kernels,
    statistics,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import with_devices

from headcount import attention
from headcount.attention import masks
from tests.marks import slow_but

pytestmark = needs_kernels
attend = attention.dot_product_attention


def native(inputs, arguments):
    """Values, gradients and statistics, of one pass and alone."""
    alone = jax.jit(lambda x: statistics("cpu", x, arguments))(inputs)
    return everything("cpu", inputs, arguments), alone


@pytest.mark.parametrize("feature", KERNEL_FEATURES)
def test_features(feature):
    inputs, arguments = make(feature)
    together, alone = native(inputs, arguments)
    check(together, expected(feature))
    check(alone, expected(feature))


@pytest.mark.parametrize(
    "feature, shape",
    [
        ("everything", (1, 600, 300, 2, 1, 16, 8)),
        ("segments", (2, 300, 140, 2, 2, 33, 70)),
        ("causal window", (1, 530, 530, 2, 2, 8, 8)),
        ("unordered segments", (1, 150, 260, 3, 1, 5, 3)),
    ],
)
def test_many_blocks(feature, shape):
    """Across the borders of blocks, of parts of a head, and of vectors."""
    inputs, arguments = make(feature, shape=shape)
    together, alone = native(inputs, arguments)
    want = everything("reference", inputs, arguments)
    check(together, want)
    check(alone, want)


@given(
    sizes=st.tuples(*[st.integers(1, 150)] * 2, *[st.integers(1, 3)] * 3),
    widths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    window=st.none() | st.tuples(st.integers(0, 90), st.integers(0, 90)),
    features=st.sets(
        st.sampled_from(["lengths", "segments", "mask of B N T S", "mask of N T"])
    ),
    is_causal=st.booleans(),
)
@settings(max_examples=20, deadline=None, derandomize=True)
@pytest.mark.slow
def test_any_shape_and_mask(sizes, widths, window, features, is_causal):
    """Whatever masks meet."""
    T, S, B, K, G = sizes
    shape = (B, T, S, K * G, K, *widths)
    inputs, _ = make("nothing", shape=shape)
    arguments = {"is_causal": is_causal, "local_window_size": window}
    for feature in sorted(features):
        arguments |= make(feature, shape=shape)[1]
    want = everything("reference", inputs, arguments)
    check(everything("cpu", inputs, arguments), want)


def test_large_logits():
    """Weights that only differences of large numbers tell."""
    (query, key, value), arguments = make("causal")
    inputs = 30 * query, 30 * key, value
    together, _ = native(inputs, arguments)
    check(together, everything("reference", inputs, arguments))


def test_exponentials():
    """By the weights of keys in one block: exact to float32, and 0 far below."""
    logits = np.linspace(-89, 0, 120, dtype=np.float32)
    query = np.ones((1, 1, 1, 1), np.float32)
    key = logits.reshape(1, -1, 1, 1)
    value = np.eye(len(logits), dtype=np.float32)[None, :, None]
    weights = attend(query, key, value, scale=1.0, implementation="cpu")[0, 0, 0]
    found = np.float64(weights) / np.float64(weights[-1])
    want = np.exp(np.float64(logits))
    near = logits > -85  # beyond, a weight has fewer digits
    np.testing.assert_allclose(found[near], want[near], rtol=3e-7)
    assert not found[logits < -88].any()


def test_nan_is_told():
    """A key that is not a number shows in every query that sees it, in no other."""
    (query, key, value), _ = make("nothing")
    key = key.at[:, 5].set(jnp.nan)
    out, lse = attend(
        *(query, key, value),
        is_causal=True,
        implementation="cpu",
        return_residual=True,
    )
    seen = np.arange(13) >= 5
    np.testing.assert_array_equal(np.isnan(out).all((0, 2, 3)), seen)
    np.testing.assert_array_equal(np.isnan(lse).all((0, 2)), seen)
    assert np.isfinite(out[:, :5]).all()


def slopes(query, key, value, arguments):
    """Output and log-sum-exp, and the gradients of a number made of both."""

    def total(*inputs):
        out, lse = attend(
            *inputs, **arguments, implementation="cpu", return_residual=True
        )
        seen = jnp.where(lse > masks.EMPTY, lse, 0)
        return (out**2).sum() + seen.sum(), (out, lse)

    return jax.grad(total, (0, 1, 2), has_aux=True)(query, key, value)


def same(found, want):
    """The bits."""
    for x, y in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "shared", slow_but(["key, value"], ["nothing", "key, value", "arguments"])
)
def test_trials(shared):
    """vmap once and twice, over all or some arrays, and lax.map: the same bits."""
    shape = 2, 70, 140, 4, 2, 24, 8
    inputs, arguments = make("everything", shape=shape)
    arguments |= make("mask of B S", shape=shape)[1]
    constant = {
        name: arguments.pop(name) for name in ("is_causal", "local_window_size")
    }
    arrays = dict(zip(("query", "key", "value"), inputs, strict=True)) | arguments
    fixed = {"nothing": (), "key, value": ("key", "value"), "arguments": arguments}
    axes = {name: None if name in fixed[shared] else 0 for name in arrays}

    def run(arrays):
        query, key, value = (arrays[name] for name in ("query", "key", "value"))
        given = {name: arrays[name] for name in arguments}
        return slopes(query, key, value, given | constant)

    def stacked(arrays):
        """Two that differ, of what is mapped."""
        return {
            name: x if axes[name] is None else jnp.stack([x, jnp.roll(x, 1, -1)])
            for name, x in arrays.items()
        }

    def take(arrays, i):
        return {n: x if axes[n] is None else x[i] for n, x in arrays.items()}

    two = stacked(arrays)
    alone = [jax.jit(run)(take(two, i)) for i in range(2)]
    want = jax.tree.map(lambda *x: jnp.stack(x), *alone)
    mapped = jax.vmap(run, in_axes=(axes,))
    same(jax.jit(mapped)(two), want)
    if shared == "nothing":
        same(jax.jit(lambda two: jax.lax.map(run, two))(two), want)
    four = {
        n: x if axes[n] is None else jnp.stack([x, x[::-1]]) for n, x in two.items()
    }
    twice = jax.jit(jax.vmap(mapped, in_axes=(axes,)))(four)
    same(twice, jax.tree.map(lambda x: jnp.stack([x, x[::-1]]), want))


def test_bits_stay():
    """Whichever thread computes what; and rematerialised, and without a batch."""
    inputs, arguments = make("segments", shape=(4, 200, 200, 4, 2, 16, 16))
    run = jax.jit(lambda *inputs: slopes(*inputs, arguments))
    want = run(*inputs)
    for _ in range(20):
        same(run(*inputs), want)

    def number(*inputs):
        return (attend(*inputs, **arguments, implementation="cpu") ** 2).sum()

    saved = jax.jit(jax.grad(jax.checkpoint(number), (0, 1, 2)))(*inputs)
    same(saved, jax.jit(jax.grad(number, (0, 1, 2)))(*inputs))
    first = {name: x[0] for name, x in arguments.items()}
    out, lse = attend(
        *(x[0] for x in inputs), **first, implementation="cpu", return_residual=True
    )
    same((out, lse), jax.tree.map(lambda x: x[0], want[1]))


def test_first_derivative_only():
    inputs, _ = make("nothing", shape=(1, 3, 3, 1, 1, 4, 4))

    def slope(query):
        run = functools.partial(attend, implementation="cpu")
        return jax.grad(lambda x: run(x, *inputs[1:]).sum())(query).sum()

    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.grad(slope)(inputs[0])


MEMORY = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from attention import dot_product_attention

T = int(sys.argv[1])
x = jnp.ones((1, T, 1, 16))

def run(x):
    attend = dot_product_attention
    return jax.grad(lambda x: attend(x, x, x, implementation=sys.argv[2]).sum())(x)

jax.block_until_ready(jax.jit(run)(x))
print(*re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_grows_as_length():
    """What a process holds at most: of T = 4096 a map alone would be 64 MiB."""

    def most(T, implementation):
        command = [sys.executable, "-c", MEMORY, str(T), implementation]
        environment = with_devices(1)
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    least = most(64, "cpu")
    assert most(4096, "cpu") < least + 32 * 1024
    assert most(4096, "reference") > least + 64 * 1024


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bit_arrays(dtype):
    """Computed in float32: outputs are the rounded ones of the rounded inputs."""
    inputs, arguments = make("bias of N T S", dtype)
    assert attention.resolve_implementation(*inputs) == "cpu"
    got = everything("cpu", inputs, arguments)
    assert got["out"].dtype == got["gradient of key"].dtype == dtype
    assert got["lse"].dtype == jnp.float32
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    want = everything("reference", exact, arguments)
    check(got, want, jnp.bfloat16)
    for name in ("lse", "entropy"):  # not of out or its cotangent, which are rounded
        check({name: got[name]}, want)


def test_other_types_are_refused():
    with jax.enable_x64(True):
        inputs, _ = make("nothing", jnp.float64)
        told = "'cpu' takes query, .* in float32, .*, not in float64; use 'blockwise'"
        with pytest.raises(NotImplementedError, match=told):
            attend(*inputs, implementation="cpu")
        assert attention.resolve_implementation(*inputs) == "blockwise"


def test_a_constant_bias_has_no_gradient_to_compute():
    """The kernel writes the gradient of a bias, `B N T S`, only where it is wanted."""
    inputs, arguments = make("bias of N T S")

    def number(query, bias):
        return attend(query, *inputs[1:], bias, implementation="cpu").sum()

    of_query = jax.jit(jax.grad(number)).lower(inputs[0], arguments["bias"])
    of_both = jax.jit(jax.grad(number, (0, 1))).lower(inputs[0], arguments["bias"])
    B, T, N, _ = inputs[0].shape
    map_type = f"tensor<{B}x{N}x{T}x{inputs[1].shape[1]}xf32>"
    assert map_type in of_both.as_text() and map_type not in of_query.as_text()


@pytest.mark.parametrize("sizes", [(64, 64), (7, 5), (16, 24)])
def test_bfloat16_is_computed_in_float32_and_rounded_once(sizes):
    """To the nearest number, ties to even; with infinities and NaN among the values."""
    H, V = sizes
    rng = np.random.default_rng(0)
    shapes = (2, 40, 4, H), (2, 40, 2, H), (2, 40, 2, V)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes]
    special = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 3e38], jnp.bfloat16)
    arrays[2] = arrays[2].at[1, 20, 0, :4].set(special)
    wide = [x.astype(jnp.float32) for x in arrays]
    call = functools.partial(attend, implementation="cpu", is_causal=True)
    rounded, found = call(*wide).astype(jnp.bfloat16), call(*arrays)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.isnan(found), np.isnan(rounded))
    np.testing.assert_array_equal(
        np.nan_to_num(np.float32(found)), np.nan_to_num(np.float32(rounded))
    )


@pytest.mark.parametrize("K", [4, 2])
def test_gradients_in_bfloat16_are_the_rounded_ones_of_float32(K):
    rng = np.random.default_rng(0)
    shapes = (2, 40, 4, 16), (2, 40, K, 16), (2, 40, K, 8), (2, 40, 4, 8)
    arrays = [jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes]

    def gradients(*arrays):
        call = functools.partial(attend, implementation="cpu", is_causal=True)
        return jax.vjp(call, *arrays[:3])[1](arrays[3])

    wide = gradients(*(x.astype(jnp.float32) for x in arrays))
    for found, exact in zip(gradients(*arrays), wide, strict=True):
        assert found.dtype == jnp.bfloat16
        error = np.abs(np.float32(found) - exact).max() / np.abs(exact).max()
        assert error < 2**-7  # a rounding of the output, and of each head's part
