"""The GPU kernels through NVIDIA's compiler, for an H200, on a machine without one.

jax-cuda13-plugin compiles for a described GPU down to machine code and refuses what
exceeds its shared memory; ptxas, from nvidia-cuda-nvcc, tells registers and spills.
"""

import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from headcount.attention import pallas_gpu, pallas_gpu_blocks
from headcount.runtime import topology as targets

T = 16384  # a map of one head in float32 is 1 GiB
MIB = 2**20
LIMIT = 32 * MIB
NOTHING = {
    "scale": 0.125,
    "is_causal": False,
    "local_window_size": None,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
    "query_segment_ids": None,
    "key_value_segment_ids": None,
}


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
        options = {**NOTHING, **structure, **extra}
        bias, mask = options.pop("bias", None), options.pop("mask", None)

        def attend(query, key, value):
            return pallas_gpu.attend(query, key, value, bias, mask, **options)

        (out, lse), transpose = jax.vjp(attend, query, key, value)
        return out, lse, transpose((out_gradient, lse))

    return function


def statistics(query, key, value, out_gradient, extra):
    """Beside the output, from the same kernel."""
    del out_gradient
    options = {**NOTHING, **extra, "statistics": True}
    return pallas_gpu.attend(query, key, value, None, None, **options)


def kernels(program):
    """The names of the Triton kernels in the compiled program."""
    calls = re.findall(r"custom_call_target=\"__gpu\$xla\.gpu\.triton\".*", program)
    return sorted(re.search(r'name = "(\w+)"', call)[1] for call in calls)


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
    "float32": ({"dtype": jnp.float32}, {"is_causal": True}),
    "V > H": ({"H": 48, "V": 96}, {}),
    "V < H": ({"H": 192, "V": 64}, {}),
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
    "mask of keys, bias of heads": (
        {
            "mask": ((1, 1, 1, T), jnp.bool_),
            "bias": ((1, 2, 1, T), jnp.float32),
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_memory_grows_with_length_alone(case, one):
    sizes, structure = CASES[case]
    program = compiled(forward_and_backward(**structure), shapes(**sizes), one)
    assert kernels(program.as_text()) == BACKWARD
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
    assert kernels(program.as_text()) == ["statistics"]
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
    assert kernels(program.as_text()) != BACKWARD
    assert working_memory(program) > 10 * LIMIT


@pytest.mark.parametrize("sizes", [(1, 1, 8), (1, 300, 16), (300, 1, 24), (37, 50, 8)])
def test_short_and_odd_sequences_compile(sizes, one):
    T, S, H = sizes
    arrays = shapes(B=3, T=T, S=S, H=H, V=H, dtype=jnp.float32)
    program = compiled(forward_and_backward(is_causal=True), arrays, one)
    assert kernels(program.as_text()) == BACKWARD


def ptxas():
    import nvidia

    roots = [Path(root) for root in nvidia.__path__]
    return next(path for root in roots for path in root.glob("*/bin/ptxas"))


def resources(folder):
    """Of each kernel: registers a thread, bytes spilled, whether it uses wgmma."""
    found = {}
    for path in Path(folder).glob("*.ptx"):
        text = path.read_text()
        names = re.findall(r"\.entry (\w+)\(", text)
        if not set(names) & {*BACKWARD, "statistics"}:
            continue
        command = [ptxas(), "-v", "-arch=sm_90a", path, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True)
        entries = re.findall(
            r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores"
            r".*?Used (\d+) registers",
            report.stderr,
            re.DOTALL,
        )
        bodies = dict(zip(names, text.split(".entry ")[1:], strict=True))
        for name, spilled, registers in entries:
            found[name] = int(registers), int(spilled), "wgmma" in bodies[name]
    return {name: found[name] for name in found if name in (*BACKWARD, "statistics")}


WIDTHS = list(pallas_gpu_blocks.TILES["forward"])


@pytest.mark.parametrize("itemsize, width", WIDTHS)
def test_tiles_fit_the_chip(itemsize, width, one, tmp_path):
    """Shared memory (else compiling fails), registers, and the tensor cores in use."""
    dtype = jnp.bfloat16 if itemsize == 2 else jnp.float32
    arrays = shapes(T=4096, H=width, V=width, dtype=dtype)

    def everything(*arrays):
        backward = forward_and_backward(is_causal=True)
        return backward(*arrays), statistics(*arrays)

    compiled(everything, arrays, one, folder=tmp_path)
    found = resources(tmp_path)
    assert sorted(found) == sorted([*BACKWARD, "statistics"])
    for kernel, (registers, spilled, tensor_cores) in found.items():
        tiles = pallas_gpu_blocks.choose_tiles(kernel, width, dtype, 4096, 4096)
        assert registers * 32 * tiles.num_warps <= 65536, kernel
        if itemsize == 2:
            assert tensor_cores and spilled == 0, (kernel, spilled)


COLLECTIVES = r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


def collectives(program):
    return set(re.findall(COLLECTIVES, program.as_text()))


def sharded(K):
    extra = {name: ids(512, B=4) for name in NOTHING if "segment" in name}
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
    assert kernels(program.as_text()) == BACKWARD
    assert collectives(program) == expected


def test_guard_catches_a_gather(four, monkeypatch):
    monkeypatch.setattr(
        pallas_gpu, "partitioned", lambda function, arrays, *_: function(arrays)
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
    assert kernels(program.as_text()) == BACKWARD
    assert collectives(program) == set()
