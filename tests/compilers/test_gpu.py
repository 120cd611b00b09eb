"""The GPU kernels through NVIDIA's compiler, for an H200, on a machine without one.

jax-cuda13-plugin compiles for a described GPU down to machine code, and fails if shared
memory is exceeded. Mosaic GPU writes PTX, and ptxas reports registers and spills.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headcount import attention
from headcount.attention.kernels import blockwise, gpu
from headcount.attention.verification import NOTHING
from headcount.runtime import topology as targets

T = 16384  # a map of one head in float32 is 1 GiB
MIB = 2**20
LIMIT = 32 * MIB
SCALED = NOTHING | {"scale": 0.125}


@pytest.fixture(scope="module")
def one():
    return Mesh(targets.devices("h200:1"), ("data",))


@pytest.fixture(scope="module")
def four():
    axes = (AxisType.Auto,) * 2
    return Mesh(
        targets.devices("h200:4").reshape(2, 2), ("data", "model"), axis_types=axes
    )


def compiled(function, arrays, mesh, specs=None, folder=None):
    specs = specs or jax.tree.map(lambda _: PartitionSpec(), arrays)
    arrays = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        arrays,
        specs,
    )
    options = {"xla_dump_to": str(folder)} if folder else {}
    with jax.set_mesh(mesh):
        lowered = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",))
        return lowered.compile(compiler_options=options)


def shapes(B=1, T=T, S=None, N=2, K=2, H=64, V=64, dtype=jnp.bfloat16, **maps):
    S = S or T
    sizes = (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, T, N, V)
    arrays = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    return (*arrays, {name: jax.ShapeDtypeStruct(*x) for name, x in maps.items()})


def forward_and_backward(**structure):
    """Output, log-sum-exp and the gradients through both."""

    def function(query, key, value, out_gradient, extra):
        options = {**SCALED, **structure, **extra}

        def attend(query, key, value):
            return gpu.attend(query, key, value, None, None, **options)

        (out, lse), transpose = jax.vjp(attend, query, key, value)
        return out, lse, transpose((out_gradient, lse))

    return function


def statistics(query, key, value, out_gradient, extra):
    """Beside the output, from the same kernel."""
    del out_gradient
    options = {**SCALED, **extra, "statistics": True}
    return gpu.attend(query, key, value, None, None, **options)


def kernels(program):
    """The names of the Mosaic kernels in the compiled program."""
    calls = re.findall(r'custom_call_target="mosaic_gpu_v2".*', program.as_text())
    names = re.compile(
        r"00(forward|statistics|query_gradient|key_value_gradient)_mosaic_gpu"
    )
    return sorted(names.search(call)[1] for call in calls)


def working_memory(program):
    """Bytes beyond arguments and results."""
    return program.memory_analysis().temp_size_in_bytes


def ids(size, B=1):
    return (B, size), jnp.int32


BACKWARD = ["forward", "key_value_gradient", "query_gradient"]
CASES = {
    "H 32": ({"H": 32, "V": 32}, {"is_causal": True}),
    "H 64": ({}, {"is_causal": True}),
    "H 128": ({"H": 128, "V": 128}, {"is_causal": True}),
    "V > H": ({"H": 48, "V": 96}, {}),
    "V < H": ({"H": 96, "V": 64}, {}),
    "groups": ({"N": 6, "K": 2}, {"is_causal": True}),
    "one key head": ({"N": 4, "K": 1}, {"local_window_size": (1000, 0)}),
    "segments": (
        {"query_segment_ids": ids(T), "key_value_segment_ids": ids(T)},
        {"is_causal": True},
    ),
    "lengths, odd sizes": (
        {
            "T": T - 37,
            "S": T - 1,
            "query_seq_lengths": ((1,), jnp.int32),
            "key_value_seq_lengths": ((1,), jnp.int32),
        },
        {},
    ),
}
# Bytes per thread that 240 registers may spill, by head size; 0 for others.
SPILLED = {128: 200}


@pytest.mark.parametrize("case", CASES)
def test_memory_grows_with_length_alone(case, one):
    sizes, structure = CASES[case]
    program = compiled(forward_and_backward(**structure), shapes(**sizes), one)
    assert kernels(program) == BACKWARD
    assert working_memory(program) <= LIMIT


def test_memory_doubles_with_length(one):
    def needed(T):
        sizes = shapes(
            T=T, query_segment_ids=ids(T), key_value_segment_ids=ids(T), N=8, K=8
        )
        return working_memory(compiled(forward_and_backward(), sizes, one))

    assert needed(4 * T) <= 4.2 * needed(T)


def test_statistics_need_no_map(one):
    extra = {"query_segment_ids": ids(T), "key_value_segment_ids": ids(T)}
    program = compiled(statistics, shapes(**extra), one)
    assert kernels(program) == ["statistics"]
    assert working_memory(program) <= LIMIT


def einsum(query, key, value, out_gradient, extra):
    """Attention as it reads: what the guards must catch."""

    def attend(query, key, value):
        logits = jnp.einsum("BTNH,BSNH->BNTS", query, key)
        weights = jax.nn.softmax(logits.astype(jnp.float32)).astype(query.dtype)
        return jnp.einsum("BNTS,BSNV->BTNV", weights, value)

    out, transpose = jax.vjp(attend, query, key, value)
    return out, transpose(out_gradient)


def test_guards_catch_plain_einsum(one):
    program = compiled(einsum, shapes(), one)
    assert kernels(program) != BACKWARD
    assert working_memory(program) > 10 * LIMIT


@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 300, 16), (300, 1, 24), (37, 50, 8)])
def test_short_and_odd_sequences_compile(sizes, one):
    T, S, H = sizes
    arrays = shapes(B=3, T=T, S=S, H=H, V=H, dtype=jnp.float16)
    program = compiled(forward_and_backward(is_causal=True), arrays, one)
    assert kernels(program) == BACKWARD


def resources(folder):
    """Of each kernel: bytes spilled, and its wgmmas."""
    found = {}
    for path in Path(folder).glob("*.ptxas"):
        report = path.read_text()
        name = re.search(r"entry function '(\w+)_mosaic_gpu_kernel'", report)[1]
        assert not re.search("ignored|serialized", report), report  # a warning's words
        spilled = int(re.search(r"(\d+) bytes spill stores", report)[1])
        wgmmas = path.with_suffix(".ptx").read_text().count("wgmma.mma_async")
        found.setdefault(name, []).append((spilled, wgmmas))
    return found


@pytest.mark.parametrize("width", [32, 64, 96, 128])
@pytest.mark.parametrize("packed", [False, True])
def test_registers_hold_the_blocks(width, packed, one, tmp_path, monkeypatch):
    """And the tensor cores multiply. Too much shared memory does not compile."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    T = 4096
    segments = {name: ids(T) for name in SCALED if packed and "segment" in name}
    arrays = shapes(T=T, H=width, V=width, **segments)
    options = {**SCALED, "is_causal": True, "statistics": True}

    def everything(*arrays):
        query, key, value, _, extra = arrays
        backward = forward_and_backward(is_causal=True)
        look = functools.partial(gpu.attend, **{**options, **extra})
        return backward(*arrays), look(query, key, value, None, None)

    compiled(everything, arrays, one)
    found = resources(tmp_path)
    for path in tmp_path.glob("*.log"):  # tens of MB
        path.unlink()
    assert sorted(found) == sorted([*BACKWARD, "statistics"])
    for name, programs in found.items():
        for spilled, wgmmas in programs:
            assert wgmmas > 0 and spilled <= SPILLED.get(width, 0), (name, spilled)


def test_every_feature_compiles(one, tmp_path, monkeypatch):
    """Dropout, slopes, gates, statistics; and the gradients, also by the gates."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    extra = {name: ids(512) for name in SCALED if "segment" in name}
    floats = {"alibi_slopes": ((4,), jnp.float32), "head_gate": ((4,), jnp.float32)}

    def function(query, key, value, out_gradient, extra):
        def attend(query, key, value, head_gate):
            out, statistics = attention.dot_product_attention(
                *(query, key, value),
                **extra | {"head_gate": head_gate},
                implementation="gpu",
                is_causal=True,
                dropout_rate=0.1,
                dropout_seed=0,
                return_statistics=True,
            )
            return out, statistics.max_logit

        inputs = query, key, value, extra["head_gate"]
        out, transpose, largest = jax.vjp(attend, *inputs, has_aux=True)
        return out, largest, transpose(out_gradient)

    program = compiled(function, shapes(T=512, N=4, K=2, **extra, **floats), one)
    assert kernels(program) == ["key_value_gradient", "query_gradient", "statistics"]
    found = resources(tmp_path)
    assert set(found) == set(kernels(program))
    assert all(wgmmas > 0 for programs in found.values() for _, wgmmas in programs)


COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def collectives(program):
    return set(re.findall(COLLECTIVES, program.as_text()))


def sharded(K):
    extra = {name: ids(512, B=4) for name in SCALED if "segment" in name}
    arrays = shapes(B=4, T=512, N=8, K=K, **extra)
    heads = PartitionSpec("data", None, "model")
    keys = heads if K > 1 else PartitionSpec("data")
    specs = heads, keys, keys, heads, dict.fromkeys(extra, PartitionSpec("data"))
    return arrays, specs


@pytest.mark.parametrize("K, expected", [(8, set()), (4, set()), (1, {"all-reduce"})])
def test_batch_and_heads_stay_sharded(K, expected, four):
    """One key head for all must be summed over the devices, and nothing else moved."""
    arrays, specs = sharded(K)
    program = compiled(forward_and_backward(), arrays, four, specs)
    assert kernels(program) == BACKWARD
    assert collectives(program) == expected


def test_guard_catches_a_gather(four, monkeypatch):
    monkeypatch.setattr(
        gpu, "partitioned", lambda function, arrays, *_: function(arrays)
    )
    arrays, specs = sharded(8)
    program = compiled(forward_and_backward(), arrays, four, specs)
    assert "all-gather" in collectives(program)


def inside_shard_map(function, mesh):
    """The program of a function with eight heads, divided by `jax.shard_map`."""
    arrays, specs = sharded(8)
    heads = PartitionSpec("data", None, "model")
    outs = heads, heads, (heads,) * 3
    divided = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=outs)
    return compiled(divided, arrays, mesh, specs)


def test_inside_shard_map(four):
    program = inside_shard_map(forward_and_backward(), four)
    assert kernels(program) == BACKWARD
    assert collectives(program) == set()


def test_a_trial_axis_is_one_kernel(one):
    extra = {name: ids(512) for name in SCALED if "segment" in name}
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), shapes(T=512, **extra)
    )
    function = jax.vmap(jax.checkpoint(forward_and_backward()))
    program = compiled(function, arrays, one)
    assert kernels(program) == BACKWARD


def test_blockwise_updates_its_sums_in_place(one):
    """Known blocks are a loop of known length; rows of a batch share its indices."""

    def function(query, key, value, out_gradient, extra):
        options = {**SCALED, "is_causal": True, **extra}

        def attend(query, key, value):
            return blockwise.attend(query, key, value, None, None, **options)[0]

        out, transpose = jax.vjp(attend, query, key, value)
        return out, transpose(out_gradient)

    arrays = shapes(B=2, T=1024)
    text = compiled(function, arrays, one).as_text()
    assert 0 < text.count(" while(") == text.count("known_trip_count")
    extra = {name: ids(1024, B=2) for name in SCALED if "segment" in name}
    text = compiled(function, shapes(B=2, T=1024, **extra), one).as_text()
    assert not re.search(r"= (bf16|f32)\[\S+ (gather|scatter)\(", text)


def test_x64_mode(one):
    with jax.enable_x64(True):
        extra = {name: ids(512) for name in SCALED if "segment" in name}
        arrays = shapes(T=512, N=4, K=2, **extra)
        program = compiled(forward_and_backward(is_causal=True), arrays, one)
    assert kernels(program) == BACKWARD
