"""Predict attention's time on chips that are not attached, from their compilers.

    .venv-compilers/bin/python -m benchmarks.roofline [--implementations tpu gpu ...]

This compiles each implementation for each chip and shape. It prints a Markdown table
with what the programs need, and the larger of two times: the arithmetic at the chip's
peak, and the memory traffic at its bandwidth. Nothing is executed or measured. Only one
process at a time may use libtpu.
"""

import argparse
import datetime
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from headcount.attention import dot_product_attention, masks
from headcount.attention.kernels import tpu
from headcount.attention.kernels.tpu_blocks import tile
from headcount.runtime import topology
from headcount.training.hlo_cost import Program

MIB = 2**20
BFLOAT16 = 2  # bytes
# B, T = S, N, K, H = V; all causal, in bfloat16.
SHAPES = {
    "64": (64, 64, 8, 8, 64),
    "2k": (8, 2048, 8, 8, 64),
    "4k": (2, 4096, 16, 2, 128),
}
# Matrix products per block: forward, and forward + backward. The backward passes of our
# kernels compute logits and their gradients twice, for queries and for keys.
PRODUCTS = {"tpu": (2, 9), "gpu": (2, 9), "blockwise": (2, 7)}
# Chips to compile each implementation for, and chips to predict with that program.
CHIPS = {
    "tpu": {"v5e": ("v5e",), "v6e": ("v6e",)},
    "gpu": {"h100": ("h100", "h200")},
    "blockwise": {"v5e": ("v5e",), "a100": ("a100",), "h100": ("h100", "h200")},
}
PACKAGES = ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")


class Needs(NamedTuple):
    """What a program needs, according to its compiler."""

    traffic: int  # bytes to and from the chip's memory
    operations: int
    scratch: int  # bytes besides arguments and results
    fast: int | None  # bytes of VMEM or shared memory of our kernels, maximum
    registers: int | None  # per thread of a GPU kernel, maximum
    spilled: int | None  # bytes per thread of a GPU kernel, maximum


def main() -> None:
    """Print the table of all shapes, implementations and chips."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--implementations", nargs="+", default=list(CHIPS))
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e", "a100", "h100"])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument(
        "--rounds",
        type=float,
        default=1,
        help="how often a loop runs that depends on data",
    )
    flags = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    versions = ", ".join(f"{x} {importlib.metadata.version(x)}" for x in PACKAGES)
    print(f"{datetime.date.today()}, commit {commit}, {versions}\n")
    print(
        f"`python -m benchmarks.roofline {' '.join(sys.argv[1:])}`".replace(" `", "`")
    )
    print(
        "\n| shape | implementation | compiled for | pass | GFLOP | traffic, MiB | "
        "operations | scratch, MiB | VMEM or shared memory, KiB | registers | "
        "spilled, bytes | predicted, ms |"
    )
    print("|", " --- |" * 4, " ---: |" * 8, sep="", flush=True)
    jax.config.update("jax_enable_compilation_cache", False)
    for shape in flags.shapes:
        for implementation in flags.implementations:
            for chip, others in CHIPS[implementation].items():
                if chip not in flags.chips:
                    continue
                for backward in (False, True):
                    cost = needs(implementation, chip, shape, backward, flags.rounds)
                    print(row(implementation, chip, others, shape, backward, cost))
                    sys.stdout.flush()


def row(implementation, chip, others, shape, backward, cost: Needs) -> str:
    """Format a program's needs and the predicted times as a row of the table."""
    flop = flops(implementation, shape, backward)
    times = ", ".join(f"{name} {predicted(name, flop, cost)}" for name in others)
    cells = [
        *(shape, implementation, chip),
        "forward + backward" if backward else "forward",
        f"{flop / 1e9:.1f}",
        f"{cost.traffic / MIB:.0f}",
        cost.operations,
        f"{cost.scratch / MIB:.0f}",
        "" if cost.fast is None else f"{cost.fast / 1024:.0f}",
        "" if cost.registers is None else cost.registers,
        "" if cost.spilled is None else cost.spilled,
        times,
    ]
    return f"| {' | '.join(map(str, cells))} |"


def flops(implementation: str, shape: str, backward: bool) -> float:
    """Return the FLOPs of the matrix products over all pairs in the causal mask."""
    B, T, N, _, H = SHAPES[shape]
    return PRODUCTS[implementation][backward] * B * N * T * (T + 1) / 2 * 2 * H


def predicted(name: str, flop: float, cost: Needs) -> str:
    """Format the larger of the times for arithmetic and for memory on a chip."""
    chip = topology.CHIPS[name]
    arithmetic, memory = flop / chip.flops, cost.traffic / chip.bandwidth
    bound = "arithmetic" if arithmetic > memory else "memory"
    return f"{1e3 * max(arithmetic, memory):.3f} ({bound})"


def needs(implementation, chip, shape, backward, rounds=1.0) -> Needs:
    """Compile attention for a chip, and return what the program needs."""
    B, T, N, K, H = SHAPES[shape]
    query, key = (
        jax.ShapeDtypeStruct((B, T, heads, H), jnp.bfloat16) for heads in (N, K)
    )
    attend = functools.partial(
        dot_product_attention, is_causal=True, implementation=implementation
    )

    def both(query, key, value, cotangent):
        out, pullback = jax.vjp(attend, query, key, value)
        return out, pullback(cotangent)

    arrays = (query, key, key, query) if backward else (query, key, key)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        on_gpu = chip in topology.GPUS
        target = f"{chip}:1" if on_gpu else f"{chip}:2x2"
        options = {"xla_dump_to": folder} if on_gpu else {}
        compiled = topology.compile_for(
            topology.devices(target),
            jax.jit(both if backward else attend),
            *arrays,
            **options,
        )
        registers, spilled, shared = of_kernels(Path(folder), chip)
    text = compiled.as_text()
    traffic, operations = Program(text, rounds).traffic()
    if implementation == "tpu":
        traffic += fetched_again(shape, backward)
    used = r'"tpu_custom_call".*"used_scoped_memory_configs":\[\{[^}]*"size":"(\d+)"'
    fast = [int(size) for size in re.findall(used, text)] + shared
    return Needs(
        traffic=round(traffic),
        operations=round(operations),
        scratch=compiled.memory_analysis().temp_size_in_bytes,
        fast=max(fast, default=None),
        registers=registers,
        spilled=spilled,
    )


def of_kernels(folder: Path, chip: str):
    """Return the maximum registers and spilled bytes per thread, and shared memory.

    Mosaic reports these numbers for its kernels. For XLA's kernels, assemble the dumped
    PTX again.
    """
    reports = [path.read_text() for path in folder.glob("*.ptxas")]
    for path in folder.glob("module_*.ptx"):
        if ".entry" not in path.read_text():
            continue
        architecture = "sm_80" if chip == "a100" else "sm_90a"
        done = subprocess.run(
            [ptxas(), "-v", f"-arch={architecture}", "-o", os.devnull, path],
            capture_output=True,
            text=True,
            check=True,
        )
        reports.append(done.stderr)
    text = "\n".join(reports)
    registers = map(int, re.findall(r"Used (\d+) registers", text))
    spilled = map(int, re.findall(r"(\d+) bytes spill stores", text))
    shared = []
    for path in folder.glob("*.mlir-passes.log"):
        with path.open() as file:  # tens of MB, but the first pass is enough
            size = re.search(
                r"dynamic_shared_memory_size %c(\d+)_i32", file.read(10**7)
            )
        shared += [int(size[1])] if size else []
    return max(registers, default=None), max(spilled, default=None), shared


@functools.cache
def ptxas() -> str:
    """Return the path of NVIDIA's assembler in its Python package."""
    files = importlib.metadata.files("nvidia-cuda-nvcc")
    return str(next(x.locate() for x in files if x.name == "ptxas"))


def fetched_again(shape: str, backward: bool) -> int:
    """Return the bytes that the TPU kernels fetch repeatedly.

    The compiled program's text counts each array once. However, a grid step fetches
    every block from memory that the previous step did not leave in VMEM.
    """
    B, T, N, K, H = SHAPES[shape]

    def visited(tiles, bounds):
        outer, inner = (tile(T, most) for most in tiles)
        count = 0
        for first in range(0, T, outer):
            start, stop = bounds(
                first, first + outer - 1, T, is_causal=True, local_window_size=None
            )
            count += -(-min(stop, T) // inner) - start // inner
        return count * inner

    def again(heads, rows, arrays):
        return B * BFLOAT16 * H * arrays * (N * rows - heads * T)

    keys = visited(tpu.FORWARD_TILES, masks.key_bounds)
    total = again(K, keys, arrays=2)
    if backward:
        keys = visited(tpu.BACKWARD_TILES, masks.key_bounds)
        queries = visited(tpu.BACKWARD_TILES[::-1], masks.query_bounds)
        total += again(K, keys, arrays=2) + again(N, queries, arrays=2)
    return max(0, total)


if __name__ == "__main__":
    main()
