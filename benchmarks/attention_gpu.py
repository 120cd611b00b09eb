"""Compare the speed of our fused attention on an NVIDIA GPU with cuDNN.

    python -m benchmarks.attention_gpu                  print the table (5 minutes)
    python -m benchmarks.attention_gpu --tune           try other tile sizes
    python -m benchmarks.attention_gpu --dry-run        trace everything, without a GPU

Implementations are timed in turn in one process. The shapes are those of
FlashAttention-2's figures (Dao 2023, arXiv:2307.08691, section 4.1): bfloat16, 16,384
tokens per batch and a model width of 2,048, so B = 16384 / T and N = 2048 / H. FLOPs
are counted as there, too: 4·T·S·H·N·B forward, half of it under a causal mask, and 2.5
times as many backward (recomputation is not counted). The share is relative to the
measured rate of an 8192³ matrix product.
"""

import argparse
import contextlib
import datetime
import functools
import itertools
import re
import statistics
import time

import jax
import jax.numpy as jnp

from headcount import attention
from headcount.attention.kernels import gpu_blocks
from headcount.attention.kernels.gpu import THREADS
from headcount.attention.kernels.gpu_blocks import Tiles
from headcount.attention.platform import compute_capability

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS, WIDTH = 16384, 2048
SECONDS = 0.1  # per measurement
ROUNDS = 5  # measurements, of which the median is printed


def duration(call, *arguments):
    """Return the median seconds per call, over several measurements of many calls."""
    return durations({"": (call, arguments)})[""]


def durations(calls):
    """Return the `duration` of each named (function, arguments), measured in turn."""
    repeats, times = {}, {name: [] for name in calls}
    for name, (call, arguments) in calls.items():
        jax.block_until_ready(call(*arguments))  # compiles
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        once = time.perf_counter() - start
        repeats[name] = max(3, int(SECONDS / once))
    for _ in range(ROUNDS):
        for name, (call, arguments) in calls.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                result = call(*arguments)
            jax.block_until_ready(result)
            times[name].append((time.perf_counter() - start) / repeats[name])
    return {name: statistics.median(values) for name, values in times.items()}


def inputs(T, H, V=None, tokens=TOKENS, dtype=jnp.bfloat16):
    B, N, V = max(1, tokens // T), WIDTH // H, V or H
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (B, T, N, H), (B, T, N, H), (B, T, N, V), (B, T, N, V)
    return [
        jax.random.normal(key, size, dtype)
        for key, size in zip(keys, sizes, strict=True)
    ]


def matmul_rate():
    """Measure the FLOP/s of a large bfloat16 matrix product."""
    size = 8192
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / duration(jax.jit(jnp.matmul), a, a)


def fused():
    """Return the names of our kernels that support this GPU."""
    return ["gpu"] * (compute_capability() == 9.0)


def passes(arrays, **options):
    """Return (function, arguments) of the forward and of the backward pass alone."""
    query, key, value, gradient = arrays

    def function(query, key, value):
        return attention.dot_product_attention(query, key, value, **options)

    forward = jax.jit(function)
    # The residuals are an argument, so that only the backward pass is timed.
    _, transpose = jax.jit(functools.partial(jax.vjp, function))(query, key, value)
    backward = jax.jit(lambda transpose, gradient: transpose(gradient))
    return {
        "forward": (forward, (query, key, value)),
        "backward": (backward, (transpose, gradient)),
    }


def work(direction, arrays, causal):
    """Return the FLOPs to count for a pass; see the module docstring."""
    (B, T, N, H), V = arrays[0].shape, arrays[2].shape[-1]
    operations = 2 * B * N * T * T * (H + V) * (0.5 if causal else 1)
    return operations * (1 if direction == "forward" else 2.5)


def compare(lengths, sizes):
    """Print the main table: TFLOP/s of ours and cuDNN at shapes that both support."""
    ceiling = matmul_rate()
    print(f"matrix product 8192³ bfloat16: {ceiling / 1e12:.0f} TFLOP/s\n")
    ours = fused()
    heads = [f"{name}, TFLOP/s | share | of cuDNN" for name in ours]
    print(f"| H | T | causal | pass | cuDNN, TFLOP/s | {' | '.join(heads)} |")
    print("|" + " --- |" * (5 + 3 * len(ours)))
    for H, causal, T in itertools.product(sizes, (False, True), lengths):
        arrays = inputs(T, H)
        calls = {
            name: passes(arrays, implementation=name, is_causal=causal)
            for name in (*ours, "cudnn")
        }
        for direction in ("forward", "backward"):
            seconds = durations({name: calls[name][direction] for name in calls})
            operations = work(direction, arrays, causal)
            rate = {name: operations / x / 1e12 for name, x in seconds.items()}
            cells = [
                f"{rate[name]:.0f} | {rate[name] * 1e12 / ceiling:.0%} "
                f"| {rate[name] / rate['cudnn']:.2f}"
                for name in ours
            ]
            print(
                f"| {H} | {T} | {'yes' if causal else 'no'} | {direction} "
                f"| {rate['cudnn']:.0f} | {' | '.join(cells)} |",
                flush=True,
            )


def packed(B, T):
    """Return the ids of segments of 64 tokens, packed as in training."""
    return jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32) // 64 + 1, (B, T))


def others():
    """Time cases that cuDNN does not support, and the statistics of heads."""
    cases = {
        "H 32": ({"T": 2048, "H": 32}, {}),
        "H 64, V 128": ({"T": 2048, "H": 64, "V": 128}, {}),
        "T 2047": ({"T": 2047, "H": 64}, {"is_causal": True}),
        "packed": ({"T": 2048, "H": 64}, {"segments": True}),
        "float32": ({"T": 2048, "H": 64, "dtype": jnp.float32}, {}),
    }
    peers = [*fused(), "blockwise", "xla"]
    print(f"\n| case | pass | {' ms | '.join(peers)} ms |")
    print("|" + " --- |" * (2 + len(peers)))
    for name, (sizes, options) in cases.items():
        arrays, options = inputs(**sizes), dict(options)
        if options.pop("segments", False):
            ids = packed(*arrays[0].shape[:2])
            options |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
        for row in rows(name, arrays, peers, **options):
            print(row, flush=True)
    arrays = inputs(4096, 64)
    look = jax.jit(lambda q, k: attention.head_statistics(q, k, implementation="gpu"))
    seconds = durations(
        {
            "forward": passes(arrays, implementation="gpu")["forward"],
            "statistics": (look, tuple(arrays[:2])),
        }
    )
    print(
        "\nstatistics, H 64, T 4096: "
        f"{seconds['statistics'] / seconds['forward']:.0%} of a forward pass"
    )


def rows(name, arrays, peers, **options):
    """Yield the rows of a case in `others`; cells of unsupported peers are empty."""
    calls = {}
    for peer in peers:
        with contextlib.suppress(NotImplementedError):
            calls[peer] = passes(arrays, implementation=peer, **options)
    for direction in ("forward", "backward"):
        seconds = durations({peer: calls[peer][direction] for peer in calls})
        cells = (f"{seconds[p] * 1e3:.2f}" if p in seconds else "" for p in peers)
        yield f"| {name} | {direction} | {' | '.join(cells)} |"


def tune(T, H, causal, implementation):
    """Print the fastest tile sizes for one shape, to copy to `gpu_blocks.TILES`."""
    arrays = inputs(T, H)
    for kernel, direction in (
        ("forward", "forward"),
        ("query_gradient", "backward"),
        ("key_value_gradient", "backward"),
    ):
        table, results = gpu_blocks.TILES[kernel], []
        size = next(key for key in table if key >= H)
        kept = table[size]
        sizes = (64, 128, 192)
        for choice in itertools.product(sizes, sizes, (1, 2, 3, 4)):
            table[size] = Tiles(*choice)
            try:
                calls = passes(arrays, implementation=implementation, is_causal=causal)
                seconds = duration(calls[direction][0], *calls[direction][1])
            except Exception as error:  # for example, too much shared memory
                if not re.search("RESOURCE_EXHAUSTED|shared memory", str(error)):
                    raise
                continue
            results.append((work(direction, arrays, causal) / seconds / 1e12, choice))
        table[size] = kept
        print(f"{implementation}, {kernel}, H {H}, T {T}, now {tuple(kept)}:")
        for rate, choice in sorted(results, reverse=True)[:6]:
            print(f"  {rate:6.0f} TFLOP/s with {choice}", flush=True)


def gradients(function, query, key, value, gradient):
    return jax.vjp(function, query, key, value)[1](gradient)


def trace():
    """Trace everything that would run, which needs no GPU."""
    choices = itertools.product(LENGTHS, (64, 128), (False, True), ["gpu_interpret"])
    for T, H, causal, name in choices:
        arrays = jax.eval_shape(functools.partial(inputs, T, H))

        function = functools.partial(
            attention.dot_product_attention,
            implementation=name,
            is_causal=causal,
        )
        results = jax.eval_shape(functools.partial(gradients, function), *arrays)
        sizes = [x.shape for x in results]
        print(name, T, H, causal, sizes, work("forward", arrays, causal))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--sizes", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--part", choices=("compare", "others"), help="default: both")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    flags = parser.parse_args()
    if flags.dry_run:
        # the simulation needs a thread of XLA per warpgroup
        jax.config.update("jax_num_cpu_devices", THREADS)
        return trace()
    if jax.default_backend() != "gpu":
        parser.error("no NVIDIA GPU at hand: --dry-run goes as far as possible")
    device = jax.devices()[0].device_kind
    print(f"{device}, jax {jax.__version__}, {datetime.date.today()}\n")
    if flags.tune:
        for name in fused():
            for H, causal in itertools.product(flags.sizes, (False, True)):
                tune(4096, H, causal, name)
        return None
    if flags.part != "others":
        compare(flags.lengths, flags.sizes)
    return others() if flags.part != "compare" else None


if __name__ == "__main__":
    main()
