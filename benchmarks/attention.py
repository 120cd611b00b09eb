"""Compare the speed of attention with torch, jax.nn and plain einsum in one process.

    .venv-peers/bin/python -m benchmarks.attention [--dtype bfloat16] [--shapes ...]

This prints a Markdown table of median milliseconds and their ratio to each peer, and to
ours with dropout (rate 0.1) and in float32. torch is left out if it is not installed,
and on accelerators, since it would run on the CPU. For cuDNN, which does not support
float32, see `benchmarks.attention_gpu`. Memory
is kept between calls, as in our scripts, for torch, too; see
`runtime.platform.keep_memory`.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on
import argparse
import datetime
import functools
import importlib.util
import os
import platform
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from headcount import attention

# "seg": rows packed from several segments, as in training.
SHAPES = ("B64xT64xN4xH32seg", "B32xT64xN8xH64", "B4xT1024xN8xH64", "B1xT8192xN8xH64")
MAPS_UP_TO = 4096  # longest T for the backward passes of peers that store a T x S map


def ours(query, key, value, ids, **arguments):
    """Call `attention.dot_product_attention`, by default with automatic dispatch."""
    return attention.dot_product_attention(
        *(query, key, value),
        query_segment_ids=ids,
        key_value_segment_ids=ids,
        **arguments,
    )


dropout = functools.partial(ours, dropout_rate=0.1, dropout_seed=0)
blockwise = functools.partial(ours, implementation="blockwise")


def jax_nn(query, key, value, ids):
    """Call `jax.nn.dot_product_attention`."""
    return jax.nn.dot_product_attention(
        query, key, value, mask=_same(ids), implementation="xla"
    )


def einsum(query, key, value, ids):
    """Compute textbook attention, which stores the T x S map."""
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key) / query.shape[-1] ** 0.5
    if ids is not None:
        logits = jnp.where(_same(ids), logits, -1e30)
    return jnp.einsum("BNTS,BSNH->BTNH", jax.nn.softmax(logits), value)


def _same(ids):
    return None if ids is None else ids[:, None, :, None] == ids[:, None, None, :]


def of_jax(function, backward, arrays, ids):
    """Return a call to time: a function's forward pass, or forward and backward."""

    @jax.jit
    def run(query, key, value, cotangent, ids):
        call = functools.partial(function, ids=ids)
        if not backward:
            return call(query, key, value)
        out, pullback = jax.vjp(call, query, key, value)
        return out, pullback(cotangent)

    arrays = [jnp.asarray(x) for x in arrays]
    return lambda: jax.block_until_ready(run(*arrays, ids=ids))


def statistics_of_jax(arrays, ids):
    """Return two calls to time: the output with statistics, and statistics alone."""
    inputs = [jnp.asarray(x) for x in arrays[:3]]
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    beside = functools.partial(attention.dot_product_attention, return_statistics=True)
    beside, alone = jax.jit(beside), jax.jit(attention.head_statistics)
    return {
        "with statistics": lambda: jax.block_until_ready(beside(*inputs, **segments)),
        "statistics alone": lambda: jax.block_until_ready(
            alone(*inputs[:2], **segments)
        ),
    }


def of_torch(backward, arrays, ids):
    """Return a call to torch's scaled_dot_product_attention, on B T N H memory."""
    import torch

    dtype = getattr(torch, str(arrays[0].dtype))
    arrays = [torch.tensor(np.float32(x)).to(dtype).transpose(1, 2) for x in arrays]
    inputs, cotangent = [x.requires_grad_(backward) for x in arrays[:3]], arrays[3]
    mask = None if ids is None else torch.tensor(np.asarray(_same(ids)))
    attend = torch.nn.functional.scaled_dot_product_attention

    def run():
        out = attend(*inputs, attn_mask=mask)
        if backward:
            torch.autograd.grad(out, inputs, cotangent)

    return run


def contenders(shape, backward, rng, dtype="float32"):
    """Return the calls to time for one shape, by name."""
    *sizes, packed = re.fullmatch(r"B(\d+)xT(\d+)xN(\d+)xH(\d+)(seg)?", shape).groups()
    B, T, N, H = map(int, sizes)
    arrays = [rng.normal(size=(B, T, N, H)).astype(np.float32) for _ in range(4)]
    ids = np.sort(rng.integers(1, 7, (B, T)), 1).astype(np.int32) if packed else None
    ids = None if ids is None else jnp.asarray(ids)
    calls = {}
    if dtype != "float32":
        calls["float32"] = of_jax(ours, backward, arrays, ids)
        arrays = [jnp.asarray(x, dtype) for x in arrays]
    calls["ours"] = of_jax(ours, backward, arrays, ids)
    if jax.default_backend() == "cpu":
        calls["with dropout"] = of_jax(dropout, backward, arrays, ids)
        calls["blockwise"] = of_jax(blockwise, backward, arrays, ids)
        if importlib.util.find_spec("torch"):
            calls["torch"] = of_torch(backward, arrays, ids)
    if T <= MAPS_UP_TO or not backward:
        calls["jax.nn"] = of_jax(jax_nn, backward, arrays, ids)
        calls["einsum"] = of_jax(einsum, backward, arrays, ids)
    if not backward:
        calls |= statistics_of_jax(arrays, ids)
    return calls


def medians(calls, seconds, clock=time.perf_counter):
    """Return the median milliseconds of every call.

    Calls are timed in turn, so that all see the same state of the machine. Each turn
    first sleeps, because torch's threads keep a core busy for a while after they are
    done, and then warms up for 30 ms, because a core is slow after sleeping.
    """
    times = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for name, call in calls.items():
            time.sleep(0.05)
            awake = time.perf_counter() + 0.03
            while time.perf_counter() < awake:
                call()
            for _ in range(4):
                start = clock()
                call()
                times[name].append(1e3 * (clock() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8, help="of each row")
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--columns", nargs="+", help="of the table; default: all")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16", "float16")
    )
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count the process's CPU time, which other work disturbs less",
    )
    flags = parser.parse_args()
    clock = time.process_time if flags.cpu_time else time.perf_counter
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0]}"
    print(f"{datetime.date.today()}, {machine}, JAX {jax.__version__}")
    print(
        f"`python -m benchmarks.attention {' '.join(sys.argv[1:])}`".replace(" `", "`")
    )
    kind = "CPU ms of the process" if flags.cpu_time else "ms"
    print(f"\nmedian {kind}, and ours divided by it\n")
    names = ["ours", "torch", "blockwise", "jax.nn", "einsum"]
    names += ["with dropout", "with statistics", "statistics alone"]
    names += ["float32"] if flags.dtype != "float32" else []
    names = [name for name in names if name in (flags.columns or names)]
    print("| shape | pass |", " | ".join(names), "|")
    print("| --- | --- |", " | ".join("---:" for _ in names), "|", flush=True)
    for shape in flags.shapes:
        for backward in (False, True):
            rng = np.random.default_rng(0)
            calls = contenders(shape, backward, rng, flags.dtype)
            calls = {name: calls[name] for name in names if name in calls}
            times = medians(calls, flags.seconds, clock)
            cells = [
                f"{times[name]:.2f} ({times['ours'] / times[name]:.2f})"
                if name in times
                else ""
                for name in names
            ]
            label = "forward + backward" if backward else "forward"
            print(f"| {shape} | {label} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
