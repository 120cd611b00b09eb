"""The fused kernels on a real NVIDIA GPU, against the reference on the same GPU.

    make test-gpu

Not collected elsewhere. In interpret mode (tests/test_pallas_gpu.py) the same code runs
without Triton's own layouts, pipelining and tf32x3 products; here it runs with them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from tests import attention_cases as cases

if jax.default_backend() != "gpu":
    pytest.exit("make test-gpu needs an NVIDIA GPU, and jax[cuda13] in .venv.", 2)
DTYPES = [jnp.float32, jnp.bfloat16]
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


def compare(inputs, arguments, dtype):
    run = functools.partial(jax.jit, static_argnames=("implementation",))
    if "bias" in arguments:
        # No gradient by it is supported: let it be a constant of both.
        bias = arguments["bias"]
        arguments = {**arguments, "mask": arguments.get("mask")}
        del arguments["bias"]

        def differentiate(implementation, inputs):
            def loss(*inputs):
                out = attention.dot_product_attention(
                    *inputs, bias, implementation=implementation, **arguments
                )
                return (out.astype(jnp.float32) ** 2).sum(), out

            gradients, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*inputs)
            return dict(zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True))

    else:

        def differentiate(implementation, inputs):
            return cases.differentiate(implementation, inputs, arguments)

    got = run(differentiate)(implementation="pallas", inputs=inputs)
    exact = tuple(x.astype(jnp.float32) for x in inputs)
    want = run(differentiate)(implementation="reference", inputs=exact)
    cases.check(got, want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", cases.FEATURES)
def test_features(feature, dtype):
    inputs, arguments = cases.make(feature, dtype)
    compare(inputs, arguments, dtype)


@pytest.mark.parametrize("feature", cases.FEATURES)
def test_statistics(feature):
    inputs, arguments = cases.make(feature)
    got = cases.statistics("pallas", inputs, arguments)
    cases.check(got, cases.statistics("reference", inputs, arguments))


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE)
def test_many_blocks(case, dtype):
    compare(*large(LARGE[case], dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "H, V",
    [(8, 8), (16, 32), (32, 16), (48, 48), (64, 128), (96, 96), (128, 128), (192, 64)]
    + [(256, 256)],
)
def test_head_sizes(H, V, dtype):
    compare(*large({"is_causal": True}, dtype, H=H, V=V), dtype)


@pytest.mark.parametrize("case", LARGE)
def test_statistics_of_many_blocks(case):
    inputs, arguments = large(LARGE[case], jnp.float32)
    got = cases.statistics("pallas", inputs, arguments)
    cases.check(got, cases.statistics("reference", inputs, arguments))


def test_bits_are_the_same_every_time():
    inputs, arguments = large({"is_causal": True}, jnp.bfloat16, T=4096, S=4096)
    run = jax.jit(lambda inputs: cases.differentiate("pallas", inputs, arguments))
    first, second = run(inputs), run(inputs)
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_long_rows_need_no_map():
    """65,536 tokens, whose map in float32 would be 16 GiB a head."""
    inputs, _ = large({}, jnp.bfloat16, T=65536, S=65536, N=2)

    @jax.jit
    def gradients(inputs):
        return cases.differentiate("pallas", inputs, {"is_causal": True})

    program = gradients.lower(inputs).compile()
    assert program.memory_analysis().temp_size_in_bytes < 256 * 2**20
    outcomes = program(inputs)
    assert all(bool(jnp.isfinite(x).all()) for x in outcomes.values())
