"""The border of `attention`: transformations, meanings, errors, and its document."""

import dataclasses
import functools
import inspect
import re
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    CPU,
    DOCUMENT,
    ROOT,
    check,
    differentiate,
    everything,
    make,
    needs_kernels,
    normal,
    table,
)
from processes import with_devices

from headcount import attention
from headcount.attention import masks, verification
from headcount.attention.api import Arguments
from headcount.attention.kernels import blockwise
from tests.programs import shapes

attend = attention.dot_product_attention
LONG = (1, 4096, 4096, 2, 2, 16, 16)


def run(implementation, inputs, **arguments):
    """Attention as one program."""
    return jax.jit(
        lambda inputs: attend(*inputs, implementation=implementation, **arguments)
    )(inputs)


def largest_of(implementation, function):
    inputs, _ = make("nothing", shape=LONG)
    jaxpr = jax.make_jaxpr(lambda x: function(implementation, x))(inputs).jaxpr
    return max(np.prod(shape, dtype=int) for shape in shapes(jaxpr))


def gradients(implementation, inputs):
    return differentiate(implementation, inputs, {"is_causal": True})


def statistics(implementation, inputs):
    return attention.head_statistics(*inputs[:2], implementation=implementation)


@pytest.mark.parametrize("function", [gradients, statistics])
def test_no_map_is_held(function):
    """No value has T x S elements, forward or backward; plain einsum's would."""
    B, T, S, N, K, H, V = LONG
    assert largest_of("blockwise", function) <= 512 * 1024 <= T * S / 16
    assert largest_of("reference", function) >= N * T * S


@pytest.mark.slow
def test_memory_grows_as_length():
    """What the compiler sets aside, forward and backward, at T and at 2 T."""

    def bytes_at(implementation, T):
        inputs, _ = make("nothing", shape=(1, T, T, 2, 2, 16, 16))
        compiled = jax.jit(lambda x: gradients(implementation, x)).lower(inputs)
        return compiled.compile().memory_analysis().temp_size_in_bytes

    assert bytes_at("blockwise", 8192) < 2.2 * bytes_at("blockwise", 4096)
    assert bytes_at("reference", 2048) > 3 * bytes_at("reference", 1024)


def test_skipped_blocks_are_not_visited(monkeypatch):
    """NaN in keys that causality, lengths and segments rule out block by block."""
    monkeypatch.setattr(blockwise, "SHORT", 0)
    monkeypatch.setattr(blockwise, "LONG", (4, 4))
    inputs, _ = make("nothing", shape=(1, 8, 16, 2, 2, 8, 8))
    query, key, value = inputs
    poisoned = value.at[:, 8:].set(jnp.nan)
    ids = jnp.repeat(jnp.arange(1, 5), 4)[None]
    for arguments in (
        {"is_causal": True},
        {"key_value_seq_lengths": jnp.array([8])},
        {"query_segment_ids": ids[:, :8], "key_value_segment_ids": ids},
        {"local_window_size": (3, 0)},
    ):
        out = run("blockwise", (query, key, poisoned), **arguments)
        want = run("reference", inputs, **arguments)
        np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "blockwise", CPU, "xla"])
def test_what_may_not_be_seen_has_no_gradient(implementation):
    """Causality, padding and segments, by the gradient of one query's output."""
    inputs, _ = make("nothing", shape=(1, 6, 6, 2, 2, 8, 8))
    ids = jnp.array([[1, 1, 1, 2, 2, 0]])

    def output_of(i, arguments):
        def number(key, value):
            out = attend(
                inputs[0], key, value, implementation=implementation, **arguments
            )
            return out[0, i].sum()

        gradient = jax.jit(jax.grad(number, (0, 1)))(*inputs[1:])
        return [np.abs(x[0]).sum((1, 2)) > 0 for x in gradient]

    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    for i, arguments, seen in (
        (3, {"is_causal": True}, [1, 1, 1, 1, 0, 0]),
        (4, {"key_value_seq_lengths": jnp.array([2])}, [1, 1, 0, 0, 0, 0]),
        (1, segments, [1, 1, 1, 0, 0, 0]),
        (5, segments, [0, 0, 0, 0, 0, 0]),
    ):
        by_key, by_value = output_of(i, arguments)
        np.testing.assert_array_equal(by_value, np.bool_(seen))
        np.testing.assert_array_equal(by_key, np.bool_(seen))


@pytest.mark.parametrize("implementation", ["reference", "blockwise", CPU, "xla"])
def test_query_that_sees_nothing(implementation):
    """Zeros, the documented log-sum-exp and no gradient, with any cotangent."""
    inputs, _ = make("nothing")
    mask = jnp.ones((13, 13), bool).at[4].set(False)
    out, lse = run(implementation, inputs, mask=mask, return_residual=True)
    assert not out[:, 4].any()
    np.testing.assert_array_equal(lse[:, 4], np.float32(masks.EMPTY))

    def number(inputs):
        return (attend(*inputs, mask=mask, implementation=implementation)[:, 4]).sum()

    assert not any(x.any() for x in jax.jit(jax.grad(number))(inputs))
    if implementation == "xla":  # its log-sum-exp has no gradient
        return

    def residual(inputs):
        arguments = {"implementation": implementation, "return_residual": True}
        return attend(*inputs, mask=mask, **arguments)[1][:, 4].sum()

    assert not any(x.any() for x in jax.jit(jax.grad(residual))(inputs))


@pytest.mark.slow
def test_transformations(monkeypatch):
    """vmap, checkpoint and a missing batch change nothing; lax.scan neither."""
    monkeypatch.setattr(blockwise, "SHORT", 0)
    monkeypatch.setattr(blockwise, "LONG", (4, 5))
    inputs, arguments = make("segments")
    want = everything("blockwise", inputs, arguments)
    trials = tuple(jnp.stack([x, x + 1]) for x in inputs)

    def outcomes(inputs):
        return differentiate("blockwise", inputs, arguments)

    def number(inputs):
        return attend(*inputs, **arguments).sum()

    other = jax.jit(outcomes)([x[1] for x in trials])
    for mapped in (jax.jit(jax.vmap(outcomes))(trials), jax.lax.map(outcomes, trials)):
        check({name: x[0] for name, x in mapped.items()}, want)
        check({name: x[1] for name, x in mapped.items()}, other)
    saved = jax.jit(jax.grad(jax.checkpoint(number)))(inputs)
    plain = jax.jit(jax.grad(number))(inputs)
    for x, y in zip(saved, plain, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)
    single = {name: x[0] for name, x in arguments.items()}
    out, lse = run(None, [x[0] for x in inputs], **single, return_residual=True)
    check({"out": out[None], "lse": lse[None]}, {n: want[n][:1] for n in want})


@pytest.mark.slow
def test_second_order():
    """The reference has one, blockwise says that it has none."""
    inputs, _ = make("nothing", shape=(1, 3, 3, 1, 1, 4, 4))

    def slope(implementation, scale):
        def number(scale):
            return attend(*inputs, scale=scale, implementation=implementation).sum()

        return jax.grad(number)(scale)

    first = jax.jit(slope, static_argnums=0)
    at, step = jnp.float32(0.5), 1e-2
    second = jax.jit(jax.grad(lambda s: slope("reference", s)))(at)
    sides = first("reference", at + step) - first("reference", at - step)
    np.testing.assert_allclose(second, sides / (2 * step), rtol=3e-3)
    with pytest.raises(NotImplementedError, match="first derivative only"):
        jax.grad(lambda s: slope("blockwise", s))(at)


SHARDED = """
import functools, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
sys.path.insert(0, "tests")
from attention_cases import check, differentiate, make
from headcount.attention import dot_product_attention
from headcount.attention.kernels import blockwise, cpu_build

blockwise.LONG = blockwise.SHARED = (150, 100)  # loops over blocks for T = 300
mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
names = ["blockwise"] + ["cpu"] * (cpu_build.unavailable() is None)
for T, name in ((T, name) for T in (64, 300) for name in names):
    inputs, _ = make("nothing", shape=(4, T, T, 4, 2, 16, 16))
    spec = NamedSharding(mesh, P("data", None, "model", None))
    run = lambda inputs: differentiate(name, inputs, {"is_causal": True})
    want = jax.jit(run)(inputs)
    compiled = jax.jit(run).lower(jax.device_put(inputs, spec)).compile()
    text = compiled.as_text()
    found = re.findall("all-gather|all-to-all|collective-permute", text)
    assert not found, (T, name, found)
    got = compiled(jax.device_put(inputs, spec))
    check({name: np.asarray(x) for name, x in got.items()}, want)
    assert not got["gradient of key"].sharding.is_fully_replicated
    bias = jnp.zeros((4, T, T))
    def slope(bias, inputs):
        attend = functools.partial(dot_product_attention, implementation="blockwise")
        return jax.grad(lambda bias: (attend(*inputs, bias) ** 2).sum())(bias)
    steep = jax.jit(slope)(bias, inputs)
    for axes in ({"data", "model"}, {"data"}):  # all of the mesh or a part of it
        mapped = functools.partial(jax.shard_map, mesh=mesh, axis_names=axes)
        local = jax.jit(mapped(run, in_specs=P("data"), out_specs=P("data")))(inputs)
        check({"out": local["out"]}, {"out": want["out"]})
        if name != "blockwise":
            continue
        shared = mapped(slope, in_specs=(P(), P("data")), out_specs=P())
        check({"bias": jax.jit(shared)(bias, inputs)}, {"bias": steep})
# The guard itself: a sum over keys that are divided needs a collective.
late = NamedSharding(mesh, P(None, "data"))
text = jax.jit(run).lower(jax.device_put(inputs, late)).compile().as_text()
assert "all-gather" in text
"""


@pytest.mark.slow
def test_sharded_over_batch_and_heads():
    """Eight devices, no gathering: a process of its own, for the devices' number."""
    process = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env=with_devices(8),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-2000:]


def test_head_gate_array_scale_and_window():
    """A gate of `N` is that of `B N`; a scale may be an array, a window NumPy's."""
    inputs, _ = make("nothing")
    gate = normal(np.random.default_rng(0), 4)
    one = attend(*inputs, head_gate=gate, scale=jnp.float32(0.3))
    many = attend(*inputs, scale=0.3) * gate[:, None]
    np.testing.assert_allclose(one, many, atol=1e-6)
    near = attend(*inputs, local_window_size=(2, 2))
    for window in (2, np.int64(2), [2, 2]):
        np.testing.assert_array_equal(attend(*inputs, local_window_size=window), near)
    with pytest.raises(
        ValueError, match="one or two whole numbers >= 0, known when compiling; got 1.5"
    ):
        attention.attention_weights(*inputs[:2], local_window_size=1.5)
    behind = attend(*inputs, local_window_size=(0, 2**40))
    upper = jnp.triu(jnp.ones((13, 13), bool))
    np.testing.assert_allclose(behind, attend(*inputs, mask=upper), atol=1e-6)
    half = [x.astype(jnp.bfloat16) for x in inputs]
    np.testing.assert_array_equal(
        attend(*half, scale=jnp.float32(0.3)), attend(*half, scale=0.3)
    )


@pytest.mark.parametrize("short", [True, False])
def test_numbers_too_large_for_their_sum(monkeypatch, short):
    """A row whose every logit is -1e9: its weights are those of equal logits."""
    if not short:
        monkeypatch.setattr(blockwise, "SHORT", 0)
        monkeypatch.setattr(blockwise, "SHARED", (4, 5))
    inputs, _ = make("nothing")
    bias = jnp.zeros((13, 13)).at[2].set(-1e9)

    def number(value):
        out = attend(*inputs[:2], value, bias, implementation="blockwise")
        return out[:, 2].sum()

    gradient = jax.jit(jax.grad(number))(inputs[2])
    np.testing.assert_allclose(gradient.sum(), inputs[0][:, 0].size, rtol=1e-4)
    found = jax.jit(attention.head_statistics)(*inputs[:2], bias)
    want = attention.head_statistics(*inputs[:2], bias, implementation="reference")
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("kind", [np.uint32, np.int64, np.uint64, list])
def test_lengths_beyond_the_end_are_the_whole(kind, monkeypatch):
    """Whatever holds them: JAX would wrap what int32 does not hold."""
    monkeypatch.setattr(blockwise, "SHORT", 0)
    monkeypatch.setattr(blockwise, "LONG", (4, 5))  # 13 keys, padded to 15
    (query, key, value), _ = make("nothing")
    inputs = abs(query), -abs(key), value  # a key of zeros would be the nearest
    most = 2**40 if kind is list else np.iinfo(kind).max
    lengths = [most] * len(query) if kind is list else np.full(len(query), most, kind)
    both = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths}
    np.testing.assert_allclose(
        run("blockwise", inputs, **both), run("blockwise", inputs), atol=1e-6
    )


@pytest.mark.slow
def test_long_rows_where_python_numbers_are_int64(monkeypatch):
    monkeypatch.setattr(blockwise, "SHORT", 0)
    monkeypatch.setattr(blockwise, "LONG", (4, 5))
    inputs, _ = make("nothing")
    want = differentiate("blockwise", inputs, {})
    with jax.enable_x64(True):
        check(differentiate("blockwise", inputs, {}), want)


# NumPy's, here and below: JAX would compile programs while this file is imported
QUERY = np.zeros((2, 5, 4, 8), np.float32)
KEY = np.zeros((2, 7, 2, 8), np.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": KEY[..., :4]}, "key must be (2, 7, 2, 8) to fit query"),
        ({"value": KEY[:, :3]}, "value must begin with key's (2, 7, 2)"),
        ({"query": QUERY[:, :, :3]}, "must be a multiple of key heads, got 3 and 2"),
        ({"query": QUERY[0]}, "key must be (1, 7, 2, 8) to fit query"),
        ({"key": KEY[0, 0]}, "key must have 4 axes or 3, got (2, 8)"),
        ({"value": KEY.astype(jnp.bfloat16)}, "must have one floating dtype"),
        (
            {x: KEY.astype(jnp.float8_e4m3fn) for x in ("query", "key", "value")},
            "float64), got float8_e4m3fn",
        ),
        ({"query": QUERY[..., :0], "key": KEY[..., :0]}, "heads of size 0"),
        ({"value": KEY[..., :0]}, "value has no heads or heads of size 0"),
        (
            {"alibi_slopes": np.ones(3)},
            "alibi_slopes must have one real number per head",
        ),
        ({"dropout_rate": 1.0}, "dropout_rate must be a number from 0 to below 1"),
        ({"dropout_rate": -0.1}, "dropout_rate must be a number from 0 to below 1"),
        ({"dropout_rate": 0.1}, "dropout_seed must be given with a dropout_rate"),
        ({"dropout_rate": 0.1, "dropout_seed": 2**32}, "from 0 to below 2**32"),
        ({"dropout_rate": 0.1, "dropout_seed": jnp.ones(2)}, "must be one integer"),
        (
            {"query_segment_ids": np.full((2, 5), 2**31)}
            | {"key_value_segment_ids": np.full((2, 7), 1)},
            "query_segment_ids must fit into int32",
        ),
        (
            {"query_segment_ids": np.full((2, 5), -(2**31))}
            | {"key_value_segment_ids": np.full((2, 7), 1)},
            "query_segment_ids must fit into int32",
        ),
        (
            {"query_segment_ids": jnp.ones((2, 5), jnp.uint32)}
            | {"key_value_segment_ids": jnp.ones((2, 7), jnp.uint32)},
            "query_segment_ids must be of a type that int32 holds, got uint32",
        ),
        ({"mask": np.ones((5, 6), bool)}, "mask must broadcast to B N T S"),
        ({"mask": np.ones((5, 7), np.float32)}, "an additive mask is a bias"),
        ({"bias": np.ones((5, 7), bool)}, "bias must be floating"),
        ({"scale": np.ones(8, np.float32)}, "scale must be one real number, got "),
        (
            {"local_window_size": (1, -1)},
            "whole numbers >= 0, known when compiling; got (1, -1)",
        ),
        ({"local_window_size": (1, 2, 3)}, "one or two whole numbers"),
        ({"query_segment_ids": np.ones((2, 5), np.int32)}, "must be given together"),
        ({"query_seq_lengths": np.ones(2)}, "must be integers of shape (2,)"),
        ({"head_gate": np.ones(3)}, "head_gate must have one number per head"),
        ({"implementation": "flash"}, "implementation must be one of reference"),
        ({"implementation": ""}, "implementation must be one of reference"),
    ],
)
def test_errors(change, message):
    arguments = {"query": QUERY, "key": KEY, "value": KEY, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        attend(**arguments)


def test_arguments_for_type_checkers_are_all_arguments():
    """The overloads take these and what follows; they tell what is returned."""
    names = "query", "key", "value", "bias", "mask"
    names += "return_residual", "return_statistics", *Arguments.__annotations__
    assert sorted(inspect.signature(attend).parameters) == sorted(names)


def test_refusals_name_the_reason():
    inputs = (QUERY, KEY, KEY)
    for wrong in ({"scale": 1j}, {"scale": "a"}, {"is_causal": "no"}):
        ((name, value),) = wrong.items()  # which tests of types would refuse before
        with pytest.raises(ValueError, match=f"{name} must be .* got {value!r}"):
            attention.arguments.normalise(*inputs, None, None, **wrong)
    with pytest.raises(
        ValueError, match="platform must be 'cpu', 'gpu', 'tpu' or None"
    ):
        attention.resolve_implementation(*inputs, platform="cuda")
    for name in ("gpu", "tpu"):
        with pytest.raises(NotImplementedError, match="the platform is 'cpu'"):
            attend(*(x.astype("bfloat16") for x in inputs), implementation=name)
    with (
        mock.patch("headcount.attention.api.current_platform", lambda: "gpu"),
        pytest.raises(NotImplementedError, match="needs a CPU, the platform is 'gpu'"),
    ):
        attend(*inputs, implementation="cpu")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        attend(*inputs, implementation="cudnn")
    with pytest.raises(NotImplementedError, match="no gradient with return_residual"):
        differentiate("xla", inputs, {})
    with pytest.raises(NotImplementedError, match="leave out return_statistics"):
        attention.head_statistics(*inputs[:2], implementation="xla")


@pytest.mark.slow
@needs_kernels
def test_table_of_support_in_the_documents_is_up_to_date():
    text = DOCUMENT.read_text()
    assert table() in text, "run `python -m tests.attention_cases` and paste the table"


@pytest.mark.parametrize(
    "platform, dtype, size, bias, name",
    [
        ("gpu", "bfloat16", 128, False, "gpu"),
        ("gpu", "float16", 64, False, "gpu"),
        ("gpu", "bfloat16", 129, False, "blockwise"),
        ("gpu", "bfloat16", 64, True, "blockwise"),
        ("gpu", "float32", 64, False, "blockwise"),
        ("tpu", "bfloat16", 256, False, "tpu"),
        ("tpu", "float32", 256, False, "tpu"),
        ("tpu", "float32", 257, False, "blockwise"),
        ("tpu", "float16", 64, False, "blockwise"),
        ("tpu", "float32", 64, True, "blockwise"),
        ("cpu", "float64", 64, False, "blockwise"),
        pytest.param("cpu", "bfloat16", 64, False, "cpu", marks=needs_kernels),
        pytest.param("cpu", "float16", 64, False, "cpu", marks=needs_kernels),
        pytest.param("cpu", "float32", 64, True, "cpu", marks=needs_kernels),
    ],
)
def test_default_implementation_of_a_platform(platform, dtype, size, bias, name):
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((1, 8, 2, size), dtype)
    bias = jax.ShapeDtypeStruct((1, 1, 8, 8), "float32") if bias else None
    assert attention.resolve_implementation(x, x, x, bias, platform=platform) == name


def test_a_tpu_mesh_whose_axes_the_kernel_does_not_know_gets_blockwise():
    """The kernel itself raises an error, which None must not run into."""
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (QUERY, KEY, KEY)]
    device = jax.sharding.AbstractDevice("TPU v5 lite", 1, "tpu")
    auto, explicit = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
    for name, size, kind, wanted in (
        ("fsdp", 2, auto, "blockwise"),
        ("fsdp", 1, auto, "tpu"),
        ("fsdp", 2, explicit, "tpu"),
        ("data", 2, auto, "tpu"),
    ):
        mesh = jax.sharding.AbstractMesh(
            (size,), (name,), (kind,), abstract_device=device
        )
        with jax.sharding.use_abstract_mesh(mesh):
            assert attention.resolve_implementation(*arrays) == wanted
            assert attention.resolve_implementation(*arrays, platform="tpu") == "tpu"


EYE = np.eye(4, dtype=np.float32)
TALKING = functools.partial(
    attention.talking_heads_attention, logits_mix=EYE, weights_mix=EYE
)


@pytest.mark.parametrize(
    "function, argument",
    [
        (attention.head_statistics, "dropout_rate"),
        (attention.attention_weights, "return_statistics"),
        (TALKING, "sink"),
        (TALKING, "return_residual"),
    ],
)
def test_an_argument_that_a_function_does_not_take_is_named(function, argument):
    inputs = (QUERY, KEY, KEY) if function is TALKING else (QUERY, KEY)
    with pytest.raises(NotImplementedError, match=f"does not take {argument}"):
        function(*inputs, **{argument: 1})
    with pytest.raises(TypeError, match="no argument 'casual'"):
        function(*inputs, casual=True)


HALF, IDS = np.ones((1, 8, 2, 16), jnp.bfloat16), np.ones((1, 8), np.int32)


@pytest.mark.parametrize(
    "name, change",
    [
        ("cudnn", {}),
        (
            "cudnn",
            {"is_causal": True, "scale": 0.5, "head_gate": np.ones(2, np.float32)},
        ),
        ("blockwise", {"is_causal": True, "local_window_size": 4}),
        ("blockwise", {"query_seq_lengths": np.array([3], np.int32)}),
        ("blockwise", {"query_segment_ids": IDS, "key_value_segment_ids": IDS}),
        ("blockwise", {"mask": np.ones((8, 8), bool)}),
        ("blockwise", {"bias": np.ones((8, 8), np.float32)}),
        ("blockwise", {"alibi_slopes": np.ones(2, np.float32)}),
        ("blockwise", {"dropout_rate": 0.1, "dropout_seed": 0}),
        ("blockwise", {"sink": np.zeros(2, np.float32)}),
        ("blockwise", {"return_residual": True}),
        ("blockwise", {"return_statistics": True}),
        ("blockwise", {"value": HALF[..., :8]}),
        ("blockwise", dict.fromkeys(("query", "key", "value"), HALF[..., :12])),
        ("blockwise", dict.fromkeys(("query", "key", "value"), HALF.astype("float32"))),
    ],
)
def test_a_gpu_without_our_kernel_runs_cudnn_where_it_fits(monkeypatch, name, change):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in ("jax_nn", "gpu"):
        path = f"headcount.attention.kernels.{module}.compute_capability"
        monkeypatch.setattr(path, lambda: 8.0)

    def stop(name):
        raise InterruptedError(name)

    monkeypatch.setattr("headcount.attention.api._function", stop)
    with pytest.raises(InterruptedError, match=name):
        attend(**{"query": HALF, "key": HALF, "value": HALF} | change)


@pytest.mark.parametrize(
    "ratio, fits, name",
    [
        (0.8, True, "gpu"),
        (1.4, True, "cudnn"),
        (1.4, False, "gpu"),
        (None, True, "gpu"),
    ],
)
def test_cudnn_is_picked_for_plain_calls_where_it_is_faster(
    monkeypatch, ratio, fits, name
):
    found = verification.Verdict("gpu", "bfloat16", "NVIDIA H100", 0.0, 0.5, None)
    found = dataclasses.replace(found, relative_to_cudnn=ratio)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in ("jax_nn", "gpu"):
        path = f"headcount.attention.kernels.{module}.compute_capability"
        monkeypatch.setattr(path, lambda: 9.0)
    monkeypatch.setattr(verification, "verdict", lambda *_: found)
    resolve = attention.resolve_implementation
    assert resolve(HALF, HALF, HALF, is_plain=fits) == name
    assert resolve(HALF[..., :12], HALF[..., :12], HALF[..., :12], is_plain=fits) == (
        "gpu"  # cuDNN takes multiples of 8
    )


@pytest.mark.parametrize(
    "reason, error, fits, name",
    [
        (None, 0.0, True, "gpu"),
        (None, 0.0, False, "gpu"),
        ("differs", 1.0, True, "cudnn"),
        ("differs", 1.0, False, "blockwise"),
        (None, None, True, "cudnn"),  # no verdict
        (None, None, False, "blockwise"),
    ],
)
def test_kernel_is_picked_only_if_verified(monkeypatch, reason, error, fits, name):
    """On Hopper, by what verification found. cuDNN has no window."""
    found = verification.Verdict("gpu", "bfloat16", "NVIDIA H100", error, 0.5, reason)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for module in ("jax_nn", "gpu"):
        path = f"headcount.attention.kernels.{module}.compute_capability"
        monkeypatch.setattr(path, lambda: 9.0)
    asked = []

    def verdict(*kernel):
        asked.append(kernel)
        return None if error is None else found

    monkeypatch.setattr(verification, "verdict", verdict)
    resolve = attention.resolve_implementation
    assert resolve(HALF, HALF, HALF, is_plain=fits) == name
    assert asked == [("gpu", "bfloat16")]
    assert resolve(HALF, HALF, HALF, is_plain=fits, platform="gpu") == "gpu"


@pytest.mark.parametrize(
    "kind, platform, name",
    [
        ("TPU v5 lite", "tpu", "tpu"),
        ("NVIDIA H100", "gpu", "gpu"),
        ("NVIDIA A100", "gpu", "blockwise"),  # Mosaic's kernel is for Hopper
    ],
)
def test_mesh_decides_the_platform(kind, platform, name):
    """Compiling for another device picks an implementation for that device."""
    device = jax.sharding.AbstractDevice(kind, 1, platform)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), (jax.sharding.AxisType.Explicit,), abstract_device=device
    )
    arrays = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (QUERY, KEY, KEY)]
    assert attention.resolve_implementation(*arrays) in ("cpu", "blockwise")
    with jax.sharding.use_abstract_mesh(mesh):
        assert attention.resolve_implementation(*arrays) == name
