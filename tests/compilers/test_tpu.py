"""The TPU's compiler accepts the kernels, in O(T) memory, without communication.

A whole T x S map in float32 is 2 GiB at the sizes of the memory tests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from headcount import attention
from headcount.attention.kernels import partition

P = jax.P
CHIPS = ("v5e:2x2", "v6e:2x2", "v5p:2x2x1")
KERNELS = {
    "attention_forward",
    "attention_query_gradient",
    "attention_key_value_gradient",
}


def arrays(B, T, S, N, K, H, V, dtype, *, trials=(), lead=(), heads=None, **extra):
    """Query, key, value and more, sharded over batch ("data") and heads ("model")."""
    kv_heads = heads if K > 1 else None
    result = {
        "query": ((B, T, N, H), dtype, ("data", None, heads)),
        "key": ((B, S, K, H), dtype, ("data", None, kv_heads)),
        "value": ((B, S, K, V), dtype, ("data", None, kv_heads)),
    }
    for name, shape in extra.items():
        kinds = {"mask": jnp.bool_, "bias": dtype}
        kinds |= dict.fromkeys(("alibi_slopes", "head_gate"), jnp.float32)
        kind = kinds.get(name, jnp.int32)
        result[name] = (shape, kind, ("data",) if shape[0] == B > 1 else ())
    return {
        name: ((*trials, *shape), kind, P(*lead, *spec))
        for name, (shape, kind, spec) in result.items()
    }


def segments(B, T, S):
    return {"query_segment_ids": (B, T), "key_value_segment_ids": (B, S)}


def gradient(implementation="tpu", trials=False, **static):
    """Gradients through the output and the log-sum-exp."""

    def one(arrays):
        rest = {x: y for x, y in arrays.items() if x not in ("query", "key", "value")}

        def loss(query, key, value):
            out, lse = attention.dot_product_attention(
                query,
                key,
                value,
                implementation=implementation,
                return_residual=True,
                **rest,
                **static,
            )
            return (out.astype(jnp.float32) ** 2).sum((1, 2, 3)), lse.sum((1, 2))

        primals = arrays["query"], arrays["key"], arrays["value"]
        (squares, sums), pullback = jax.vjp(loss, *primals)
        return pullback((jnp.ones_like(squares), jnp.ones_like(sums)))

    return jax.vmap(one) if trials else one


def kernels(compiled):
    """The names of the fused kernels in the program."""
    text = compiled.as_text()
    names = KERNELS | {"attention_statistics"}
    return {
        name
        for name in names
        if any(
            "tpu_custom_call" in line and f"{name}/pallas_call" in line
            for line in text.splitlines()
        )
    }


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_kernels_compile(chip, head_dim, devices, compile_for):
    case, static = {
        32: (
            arrays(
                2, 1024, 1536, 8, 2, 32, 64, jnp.bfloat16, **segments(2, 1024, 1536)
            ),
            {"is_causal": True},
        ),
        64: (arrays(2, 1000, 1000, 8, 8, 64, 64, jnp.bfloat16), {"is_causal": True}),
        128: (
            arrays(2, 1024, 700, 8, 1, 128, 64, jnp.float32),
            {"local_window_size": (100, 5)},
        ),
    }[head_dim]
    compiled = compile_for(devices("tpu", chip), (1, 1, 1), gradient(**static), case)
    assert kernels(compiled) == KERNELS


@pytest.mark.parametrize(
    "case",
    [
        arrays(1, 200, 200, 2, 2, 8, 16, jnp.float32, mask=(1, 2, 200, 200)),
        arrays(2, 520, 77, 4, 2, 48, 24, jnp.bfloat16, mask=(2, 1, 1, 77)),
        arrays(1, 640, 640, 2, 1, 96, 192, jnp.bfloat16, bias=(1, 2, 640, 640)),
        arrays(1, 1, 3000, 4, 1, 192, 96, jnp.float32, bias=(1, 1, 1, 3000)),
        arrays(1, 1024, 1024, 2, 2, 256, 256, jnp.float32, mask=(1, 1, 1024, 1)),
        arrays(
            1,
            1024,
            1024,
            1,
            1,
            256,
            256,
            jnp.float32,
            mask=(1, 1, 1024, 1024),
            bias=(1, 1, 1024, 1024),
            **segments(1, 1024, 1024),
        ),
    ],
    ids=lambda case: f"{case['query'][0]}",
)
def test_odd_sizes_and_maps_compile(case, devices, compile_for):
    compiled = compile_for(devices("tpu", "v5e:2x2"), (1, 1, 1), gradient(), case)
    assert kernels(compiled) == KERNELS


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_statistics_compile(dtype, devices, compile_for, scratch_bytes):
    """Alone, and beside the output from the same kernel."""
    case = arrays(1, 8192, 8192, 8, 2, 64, 64, dtype, **segments(1, 8192, 8192))

    def function(arrays):
        options = {"implementation": "tpu", "is_causal": True}
        beside = attention.dot_product_attention(
            **arrays, **options, return_statistics=True
        )
        del arrays["value"]
        return beside, attention.head_statistics(**arrays, **options)

    compiled = compile_for(devices("tpu", "v5e:2x2"), (1, 1, 1), function, case)
    assert kernels(compiled) == {"attention_statistics"}
    assert scratch_bytes(compiled) < 64 * 2**20


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_feature_compiles(dtype, devices, compile_for):
    """Dropout, slopes, gates, statistics; and the gradients, also by the gates."""
    extra = segments(2, 700, 600) if dtype == jnp.bfloat16 else {}
    extra |= {"alibi_slopes": (4,), "head_gate": (2, 4)}
    case = arrays(2, 700, 600, 4, 2, 64, 32, dtype, **extra)

    def function(arrays):
        primals = {
            name: arrays[name] for name in ("query", "key", "value", "head_gate")
        }

        def attend(primals):
            out, statistics = attention.dot_product_attention(
                **arrays | primals,
                implementation="tpu",
                is_causal=True,
                dropout_rate=0.1,
                dropout_seed=0,
                return_statistics=True,
            )
            return out, statistics.max_logit

        out, pullback, largest = jax.vjp(attend, primals, has_aux=True)
        return largest, pullback(out)

    compiled = compile_for(devices("tpu", "v6e:2x2"), (1, 1, 1), function, case)
    backward = KERNELS - {"attention_forward"}
    assert kernels(compiled) == {"attention_statistics", *backward}


@pytest.mark.parametrize("chip", CHIPS)
def test_memory_grows_as_the_sequence(chip, devices, compile_for, scratch_bytes):
    assert_linear(chip, "tpu", devices, compile_for, scratch_bytes)


def test_guard_rejects_a_whole_map(devices, compile_for, scratch_bytes):
    with pytest.raises(AssertionError, match="grows faster than T|whole map"):
        assert_linear("v5e:2x2", "reference", devices, compile_for, scratch_bytes)


def assert_linear(chip, implementation, devices, compile_for, scratch_bytes):
    sizes = []
    for T in (4096, 8192):
        case = arrays(1, T, T, 8, 8, 64, 64, jnp.bfloat16)
        function = gradient(implementation, is_causal=True)
        compiled = compile_for(devices("tpu", chip), (1, 1, 1), function, case)
        sizes.append(scratch_bytes(compiled))
    assert sizes[1] < 2.2 * sizes[0], f"memory grows faster than T: {sizes}"
    assert sizes[1] < 8 * 8192**2 * 4 / 16, f"as large as a whole map: {sizes}"


@pytest.mark.parametrize(
    ("chip", "mesh"),
    [
        ("v5e:16x16", (1, 32, 8)),
        ("v6e:16x16", (8, 8, 4)),
        ("v5p:4x8x8", (1, 64, 4)),
    ],
)
def test_256_chips_need_no_communication(chip, mesh, devices, compile_for, collectives):
    trials, data, model = mesh
    B = 2 * data
    case = arrays(
        B,
        1024,
        1024,
        2 * model,
        model,
        64,
        64,
        jnp.bfloat16,
        trials=(2 * trials,),
        lead=("trial",),
        heads="model",
        **segments(B, 1024, 1024),
    )
    function = gradient(is_causal=True, trials=True)
    compiled = compile_for(devices("tpu", chip), mesh, function, case)
    assert kernels(compiled) == KERNELS
    assert collectives(compiled) == set()


def test_multi_query_heads_sum_over_chips(devices, compile_for, collectives):
    """All heads share the keys: their gradient is the only thing to be exchanged."""
    case = arrays(64, 1024, 1024, 8, 1, 64, 64, jnp.bfloat16, heads="model")
    compiled = compile_for(devices("tpu", "v5e:16x16"), (1, 32, 8), gradient(), case)
    assert kernels(compiled) == KERNELS
    assert collectives(compiled) == {"all-reduce"}


@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_divided_among_devices_it_computes_the_same(num_kv_heads, monkeypatch):
    """On eight CPU devices, divided as for a TPU: by the names of the mesh's axes."""
    monkeypatch.setattr(partition, "platform", lambda: "tpu")
    sizes = arrays(
        4, 20, 30, 4, num_kv_heads, 8, 8, jnp.float32, trials=(2,), lead=("trial",)
    )
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(2, 2, 2),
        ("trial", "data", "model"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    rng = np.random.default_rng(0)
    inputs = {
        name: jnp.asarray(rng.normal(size=shape), dtype)
        for name, (shape, dtype, _) in sizes.items()
    }
    want = jax.jit(gradient("reference", trials=True))(inputs)
    with jax.set_mesh(mesh):
        divided = {
            name: jax.device_put(x, jax.NamedSharding(mesh, sizes[name][2]))
            for name, x in inputs.items()
        }
        function = jax.jit(gradient("tpu_interpret", trials=True))
        got = function(divided)
        assert "shard_map" in str(jax.make_jaxpr(function)(divided))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5)


def test_inside_shard_map(devices, compile_for, collectives):
    """With shard_map's own check of what varies over the devices."""
    case = arrays(8, 512, 512, 4, 2, 64, 64, jnp.bfloat16, **segments(8, 512, 512))
    sharded = jax.shard_map(
        gradient(is_causal=True), in_specs=P("data"), out_specs=P("data")
    )
    compiled = compile_for(devices("tpu", "v5e:2x2"), (1, 4, 1), sharded, case)
    assert kernels(compiled) == KERNELS
    assert collectives(compiled) == set()


def test_guard_sees_communication(devices, compile_for, collectives):
    case = arrays(64, 1024, 1024, 8, 8, 64, 64, jnp.bfloat16)
    shape, dtype, _ = case["query"]
    case["query"] = (shape, dtype, P(None, "data"))
    compiled = compile_for(devices("tpu", "v5e:2x2"), (1, 4, 1), gradient(), case)
    assert collectives(compiled) != set()


def test_unknown_mesh_axis_is_refused(devices):
    shape = jax.ShapeDtypeStruct((4, 128, 2, 64), jnp.bfloat16)
    mesh = jax.make_mesh(
        (4,),
        ("fsdp",),
        (jax.sharding.AxisType.Auto,),
        devices=devices("tpu", "v5e:2x2"),
    )
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="'fsdp'"):
        jax.jit(gradient()).lower({"query": shape, "key": shape, "value": shape})


def test_the_choice_is_the_kernel(devices, compile_for):
    case = arrays(2, 512, 512, 2, 2, 64, 64, jnp.bfloat16)
    compiled = compile_for(devices("tpu", "v5e:2x2"), (1, 1, 1), gradient(None), case)
    assert kernels(compiled) == KERNELS
