"""Compare the time that variants of heads take with their arithmetic.

    python -m benchmarks.variants [--seconds 1] [--update]

This prints a Markdown table for one layer of causal self-attention, forward and
backward: multiply-adds and time, as ratios to plain heads, and time divided by
multiply-adds. All layers are timed in turn in one process. With --update, the same for
updates of a whole model: configs/shakespeare.py:short with rotary positions, on random
characters.
"""

# isort: off
from headcount.runtime import bootstrap  # noqa: F401  before JAX is imported

# isort: on

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

from benchmarks.language_model import windows_of
from benchmarks.training import Program
from headcount.configs import shakespeare
from headcount.configs.base import get_config
from headcount.configs.variants import VARIANTS
from headcount.models.attention import Attention
from headcount.models.cost import abstract, multiply_adds, plain, products_of
from headcount.tasks import make_task

B, T, D, N = 8, 256, 512, 8
UPDATES = 8  # per call of a whole model


def layers(width: int, num_heads: int) -> dict[str, Attention]:
    """Return a layer with plain heads, and one of each variant, by name."""
    base = get_config()
    base.model.num_encoder_layers, base.model.width = 0, width
    base.model.attention.num_heads = num_heads
    found = {}
    for name, config in configs_of(base).items():
        arguments = config.model.attention.to_dict()
        found[name] = Attention(width, layer=1, **arguments, rngs=nnx.Rngs(0))
    return found


def configs_of(base) -> dict:
    """Return a config with plain heads, and one of each variant, by name."""
    configs = {"plain heads": base}
    for name, variant in VARIANTS.items():
        configs[name] = base.copy_and_resolve_references()
        configs[name].update_from_flattened_dict(variant.settings(base))
    return configs


def program(layer: Attention, x):
    """Return a call that computes a layer's output and gradients, and its cost.

    The cost is the number of multiply-adds of the layer's forward pass.
    """
    graph, params = nnx.split(layer)
    first = layer.keys_values(x)[1] if layer.value_share is not None else None

    def run(layer, x):
        return layer(x, is_causal=True, first=first)

    @jax.jit
    def train(params, x):
        out, pullback = jax.vjp(lambda p, x: run(nnx.merge(graph, p), x), params, x)
        return pullback(out)

    return partial(train, params, x), products_of(plain(layer), x, method=run)


def updates(config):
    """Return a call that updates a model on random characters, and its cost.

    The cost is the number of multiply-adds of a forward pass.
    """
    size = config.data.vocab_size
    stream = np.random.default_rng(0).integers(4, size, 1_000_000, dtype=np.int32)
    model = Program(config, windows_of(stream, config))
    cost = multiply_adds(abstract(make_task(config).build), model.batches.spec)
    return partial(model.train, UPDATES), cost


def timed(calls: dict, seconds: float) -> dict[str, float]:
    """Return the median milliseconds of each call; the calls are timed in turn."""
    for call in calls.values():
        jax.block_until_ready(call())
    times = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or len(times["plain heads"]) < 5:
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1, help="of each variant")
    parser.add_argument("--update", action="store_true", help="time whole models")
    flags = parser.parse_args()
    if flags.update:
        base = shakespeare.get_config("short")
        base.model.positions = "rotary"
        found = {name: updates(config) for name, config in configs_of(base).items()}
        sizes = f"configs/shakespeare.py:short, {UPDATES} updates"
    else:
        x = jnp.asarray(np.random.default_rng(0).normal(size=(B, T, D)), jnp.float32)
        found = {name: program(layer, x) for name, layer in layers(D, N).items()}
        sizes = f"B {B}, T {T}, D {D}, N {N}"
    times = timed({name: call for name, (call, _) in found.items()}, flags.seconds)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0]}"
    print(f"{datetime.date.today()}, {machine}, JAX {jax.__version__}")
    plain_ms = times["plain heads"]
    print(f"{sizes}, float32; plain heads {plain_ms:.1f} ms\n")
    print("| variant | multiply-adds | time | time / multiply-adds |")
    print("| --- | ---: | ---: | ---: |")
    for name, (_, adds) in found.items():
        work = adds / found["plain heads"][1]
        spent = times[name] / plain_ms
        print(f"| {name} | {work:.2f} | {spent:.2f} | {spent / work:.2f} |")


if __name__ == "__main__":
    main()
