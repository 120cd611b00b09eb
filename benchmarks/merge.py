"""Measure the cost of every merge rule: is averaging heads cheaper than concatenating?

    python -m benchmarks.merge [--sizes base tiny] [--seconds 3]
    .venv-compilers/bin/python -m benchmarks.merge --targets v5e:2x2 h200:1

This prints Markdown tables with one row per rule. They cover each rule alone, and the
self-attention layer around it, with and without the backward pass. By default they show
the time on this machine and its ratio to concat, with all rules timed in turn in one
process. With --targets, they show scratch memory and bytes moved, according to the
compilers of chips that need not be attached.
"""

import argparse
import datetime
import os
import platform
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from headcount.attention.merge import MERGE_RULES
from headcount.models.attention import Attention
from headcount.models.cost import parameters
from headcount.runtime import topology as targets

# B, T, D, N; V = D / N
SIZES = {
    "tiny": (64, 64, 128, 4),
    "base": (32, 128, 512, 8),
    "base, 32 heads": (32, 128, 512, 32),
}
MIB = 2**20


def programs(rule, B, T, D, N, dtype=jnp.float32):
    """Return the programs of a rule and its layer, and the rule's parameter count.

    The programs are (function, arguments) by name, with and without gradients.
    """
    layer = Attention(
        D, num_heads=N, merge=rule, mixture_heads=max(1, N // 2), rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(layer)
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    heads, x = (
        jnp.asarray(np.random.default_rng(0).normal(size=shape), dtype)
        for shape in ((B, T, N, D // N), (B, T, D))
    )

    def alone(params, heads, x):
        return nnx.merge(graph, params).merged(heads, x)

    def whole(params, heads, x):
        del heads
        return nnx.merge(graph, params)(x, is_causal=True)

    def gradient(function, params, heads, x):
        out, pullback = jax.vjp(function, params, heads, x)
        return pullback(out)

    arguments = params, heads, x
    functions = {
        "merge": alone,
        "merge + backward": partial(gradient, alone),
        "layer": whole,
        "layer + backward": partial(gradient, whole),
    }
    count = parameters(nnx.state(layer.merge))
    return {name: (jax.jit(f), arguments) for name, f in functions.items()}, count


def timed(size, seconds):
    """Return median milliseconds by (rule, program), and parameter counts by rule.

    All programs are timed in turn.
    """
    calls, counts = {}, {}
    for rule in MERGE_RULES:
        functions, counts[rule] = programs(rule, *size)
        for name, (function, arguments) in functions.items():
            calls[rule, name] = partial(function, *arguments)
    times = {key: [] for key in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times["concat", "layer"]) < 5:
        for key, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[key].append(1e3 * (time.perf_counter() - start))
    return {key: statistics.median(values) for key, values in times.items()}, counts


def compiled(size, target):
    """Return scratch and moved MiB by (rule, program), from the target's compiler."""
    devices = targets.devices(target)
    cells = {}
    for rule in MERGE_RULES:
        todo, _ = programs(rule, *size, jnp.bfloat16)
        for name, (function, arguments) in todo.items():
            program = targets.compile_for(devices, function, *arguments)
            scratch = program.memory_analysis().temp_size_in_bytes / MIB
            costs = program.cost_analysis()  # not available from the GPU compiler
            moved = f" / {costs['bytes accessed'] / MIB:.0f}" if costs else ""
            cells[rule, name] = f"{scratch:.1f}{moved}"
    return cells


def table(header, rows):
    """Print a Markdown table."""
    print("|", " | ".join(header), "|")
    print("| --- |", " | ".join("---:" for _ in header[1:]), "|")
    for row in rows:
        print("|", " | ".join(row), "|")
    print(flush=True)


def main():
    """Print one table per size or, with targets, per size and target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    parser.add_argument("--seconds", type=float, default=1, help="of each program")
    parser.add_argument("--targets", nargs="*", default=[])
    flags = parser.parse_args()
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0]}"
    print(f"{datetime.date.today()}, {machine}, JAX {jax.__version__}\n")
    for size in flags.sizes:
        B, T, D, N = SIZES[size]
        title = f"{size}: B {B}, T {T}, D {D}, N {N}, V {D // N}"
        if not flags.targets:
            times, counts = timed(SIZES[size], flags.seconds)
            names = [name for rule, name in times if rule == "concat"]
            print(f"{title}; median ms in float32 (as a ratio to concat's)\n")
            table(
                ["rule", "parameters", *names],
                [
                    [f"`{rule}`", f"{counts[rule]:,}"]
                    + [
                        f"{times[rule, name]:.2f} "
                        f"({times[rule, name] / times['concat', name]:.2f})"
                        for name in names
                    ]
                    for rule in MERGE_RULES
                ],
            )
        for target in flags.targets:
            cells = compiled(SIZES[size], target)
            names = [name for rule, name in cells if rule == "concat"]
            print(f"{title}; {target}, bfloat16: MiB of scratch / moved\n")
            table(
                ["rule", *names],
                [
                    [f"`{rule}`"] + [cells[rule, name] for name in names]
                    for rule in MERGE_RULES
                ],
            )


if __name__ == "__main__":
    main()
