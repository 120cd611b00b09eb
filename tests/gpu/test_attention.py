"""The fused kernels on a real NVIDIA GPU, against the reference on the same GPU.

    make test-gpu

Not collected elsewhere. In interpret mode (tests/attention/test_gpu.py) the same code
runs without Mosaic GPU's layouts and wgmma; here it runs with them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount.attention.platform import compute_capability
from tests import attention_cases as cases

if jax.default_backend() != "gpu":
    pytest.exit("make test-gpu needs an NVIDIA GPU, and jax[cuda13] in .venv.", 2)
if compute_capability() != 9.0:
    pytest.exit("make test-gpu needs compute capability 9.0 (H100, H200, GH200).", 2)
FUSED = [("gpu", jnp.bfloat16), ("gpu", jnp.float16)]
LARGE = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (150, 70)},
    "segments": {"ids": True},
    "causal segments": {"ids": True, "is_causal": True},
    "lengths": {
        "query_seq_lengths": jnp.int32([1000, 431]),
        "key_value_seq_lengths": jnp.int32([300, 777]),
    },
    "mask": {"mask": True},
}


def refused(implementation, inputs, arguments):
    """Skip what this implementation says that it does not take."""
    try:
        jax.eval_shape(
            lambda inputs: cases.differentiate(implementation, inputs, arguments),
            inputs,
        )
    except NotImplementedError as error:
        assert re.search("no mask|no bias|up to 128", str(error)), error
        pytest.skip(str(error))


def compare(inputs, arguments, implementation, dtype):
    refused(implementation, inputs, arguments)
    run = functools.partial(jax.jit, static_argnames=("implementation",))

    def differentiate(implementation, inputs):
        return cases.differentiate(implementation, inputs, arguments)

    got = run(differentiate)(implementation=implementation, inputs=inputs)
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    want = run(differentiate)(implementation="reference", inputs=exact)
    cases.check(got, want, dtype)


@pytest.mark.parametrize("implementation, dtype", FUSED)
@pytest.mark.parametrize("feature", cases.FEATURES)
def test_features(feature, implementation, dtype):
    inputs, arguments = cases.make(feature, dtype)
    compare(inputs, arguments, implementation, dtype)


@pytest.mark.parametrize("feature", cases.FEATURES)
def test_statistics(feature):
    inputs, arguments = cases.make(feature, jnp.bfloat16)
    refused("gpu", inputs, arguments)
    got = cases.statistics("gpu", inputs, arguments)
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    want = cases.statistics("reference", exact, arguments)
    cases.check(got, want, jnp.bfloat16)


def large(options, dtype, T=1000, S=777, N=4, K=2, H=64, V=64):
    rng = np.random.default_rng(1)
    sizes = (2, T, N, H), (2, S, K, H), (2, S, K, V)
    inputs = tuple(cases.normal(rng, *size).astype(dtype) for size in sizes)
    options = dict(options)
    if options.pop("ids", False):
        options |= cases.pair(cases.ids)(rng, 2, T, S, N)
    if options.pop("mask", False):
        options["mask"] = cases.allowed(rng, 1, N, T, S)
    return inputs, options


@pytest.mark.parametrize("implementation, dtype", FUSED)
@pytest.mark.parametrize("case", LARGE)
def test_many_blocks(case, implementation, dtype):
    compare(*large(LARGE[case], dtype), implementation, dtype)


@pytest.mark.parametrize("implementation, dtype", FUSED)
@pytest.mark.parametrize(
    "H, V",
    [(8, 8), (16, 32), (32, 16), (48, 48), (64, 128), (96, 96), (128, 128), (192, 64)]
    + [(256, 256)],
)
def test_head_sizes(H, V, implementation, dtype):
    compare(*large({"is_causal": True}, dtype, H=H, V=V), implementation, dtype)


@pytest.mark.parametrize("implementation, dtype", FUSED)
@pytest.mark.parametrize("case", LARGE)
def test_statistics_of_many_blocks(case, implementation, dtype):
    inputs, arguments = large(LARGE[case], dtype)
    refused(implementation, inputs, arguments)
    got = cases.statistics(implementation, inputs, arguments)
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    cases.check(got, cases.statistics("reference", exact, arguments))


IMPLEMENTATIONS = sorted({implementation for implementation, _ in FUSED})


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bits_are_the_same_every_time(implementation):
    inputs, arguments = large({"is_causal": True}, jnp.bfloat16, T=4096, S=4096)

    @jax.jit
    def run(inputs):
        return cases.differentiate(implementation, inputs, arguments)

    first, second = run(inputs), run(inputs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_rows_need_no_map(implementation):
    """65,536 tokens, whose map in float32 would be 16 GiB a head."""
    inputs, _ = large({}, jnp.bfloat16, T=65536, S=65536, N=2)

    @jax.jit
    def gradients(inputs):
        return cases.differentiate(implementation, inputs, {"is_causal": True})

    program = gradients.lower(inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20
    outcomes = program(inputs)
    assert all(bool(jnp.isfinite(x).all()) for x in outcomes.values())
