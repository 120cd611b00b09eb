"""The Hopper kernels through NVIDIA's compiler, as test_gpu.py does it with the others.

Mosaic GPU writes PTX while XLA compiles, and ptxas makes machine code of it.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import pallas_gpu
from tests.compilers import test_gpu
from tests.compilers.test_gpu import (
    BACKWARD,
    CASES,
    LIMIT,
    NOTHING,
    collectives,
    compiled,
    ids,
    shapes,
    working_memory,
)
from tests.compilers.test_gpu import four as four
from tests.compilers.test_gpu import one as one

forward_and_backward = functools.partial(test_gpu.forward_and_backward, hopper=True)
# 16 bits and structured masks are what there is.
SUPPORTED = {
    name: case
    for name, case in CASES.items()
    if not case[0].keys() & {"dtype", "mask"} and case[0].get("H", 0) <= 128
}
# Bytes a thread that 240 registers may leave over, by head size; none of others.
SPILLED = {128: 200}


def kernels(program):
    """The names of the Mosaic kernels in the compiled program."""
    calls = re.findall(r'custom_call_target="mosaic_gpu_v2".*', program.as_text())
    names = re.compile(r"00(forward|query_gradient|key_value_gradient)_mosaic_gpu")
    return sorted(names.search(call)[1] for call in calls)


def test_all_cases_but_three():
    assert CASES.keys() - SUPPORTED.keys() == {
        "float32",
        "V < H",
        "mask of keys, bias of heads",
    }


@pytest.mark.parametrize("case", SUPPORTED)
def test_memory_grows_with_length_alone(case, one):
    sizes, structure = SUPPORTED[case]
    program = compiled(forward_and_backward(**structure), shapes(**sizes), one)
    assert kernels(program) == BACKWARD
    assert working_memory(program) <= LIMIT


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
    segments = {name: ids(T) for name in NOTHING if packed and "segment" in name}
    arrays = shapes(T=T, H=width, V=width, **segments)
    options = {**NOTHING, "is_causal": True, "hopper": True, "statistics": True}

    def everything(*arrays):
        query, key, value, _, extra = arrays
        backward = forward_and_backward(is_causal=True)
        look = functools.partial(pallas_gpu.attend, **{**options, **extra})
        return backward(*arrays), look(query, key, value, None, None)

    compiled(everything, arrays, one)
    found = resources(tmp_path)
    for path in tmp_path.glob("*.log"):  # tens of MB
        path.unlink()
    assert sorted(found) == sorted([*BACKWARD, "statistics"])
    for name, programs in found.items():
        for spilled, wgmmas in programs:
            assert wgmmas > 0 and spilled <= SPILLED.get(width, 0), (name, spilled)


@pytest.mark.parametrize("K, expected", [(8, set()), (4, set()), (1, {"all-reduce"})])
def test_batch_and_heads_stay_sharded(K, expected, four):
    arrays, specs = test_gpu.sharded(K)
    program = compiled(forward_and_backward(), arrays, four, specs)
    assert kernels(program) == BACKWARD
    assert collectives(program) == expected


def test_inside_shard_map(four):
    program = test_gpu.inside_shard_map(forward_and_backward(), four)
    assert kernels(program) == BACKWARD
    assert collectives(program) == set()


def test_a_trial_axis_is_one_kernel(one):
    extra = {name: ids(512) for name in NOTHING if "segment" in name}
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), shapes(T=512, **extra)
    )
    function = jax.vmap(jax.checkpoint(forward_and_backward()))
    program = compiled(function, arrays, one)
    assert kernels(program) == BACKWARD


def test_x64_mode(one):
    with jax.enable_x64(True):
        extra = {name: ids(512) for name in NOTHING if "segment" in name}
        arrays = shapes(T=512, N=4, K=2, **extra)
        program = compiled(forward_and_backward(is_causal=True), arrays, one)
    assert kernels(program) == BACKWARD
