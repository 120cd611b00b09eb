"""Run the GPU kernels in Pallas' simulation, for tests/attention/test_gpu.py.

    python -m tests.simulated_gpu feature:causal "blocks:causal segments"

Every warpgroup is a thread, and one that waits at a barrier holds one of XLA's threads,
of which there are as many as devices: too few in the tests' own process.
"""

import sys
import threading

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import thread_map

from headcount.attention.kernels import gpu_kernels, gpu_rings
from tests import attention_cases, gpu_cases

LOCK, PROGRAMS = threading.Lock(), {}


def run_jaxpr(jaxpr, consts, *args):
    """As JAX's, which compiles it again for every warpgroup of every program."""
    with LOCK:
        if id(jaxpr) not in PROGRAMS:

            def run(consts, *args):
                jax.core.eval_jaxpr(jaxpr, consts, *args)

            program = jax.jit(run).trace(consts, *args).lower().compile()
            PROGRAMS[id(jaxpr)] = jaxpr, program  # kept, so that its id is its own
    PROGRAMS[id(jaxpr)][1](consts, *args)


def feature(name):
    """One block: values, gradients and statistics of tests/attention_cases.py."""
    inputs, arguments = attention_cases.make(name)
    arguments.pop("mask", None)  # of "everything"
    got, want = (
        attention_cases.everything(implementation, inputs, arguments)
        for implementation in ("gpu_interpret", "reference")
    )
    attention_cases.check(got, want)


def blocks(name):
    """Many blocks: a case of tests/gpu_cases.py."""
    arrays, options = gpu_cases.CASES[name]
    gpu_cases.check(arrays, **options)


def bfloat16(H, V):
    sizes = {"B": 1, "H": int(H), "V": int(V), "dtype": jnp.bfloat16}
    gpu_cases.check(gpu_cases.inputs(200, 150, **sizes), is_causal=True)


def long(_):
    """More blocks than slots, in each kernel: of three slots, and of two."""
    for T, S, H, options in (
        (100, 1000, 16, {}),
        (100, 700, 96, {"local_window_size": (60, 500)}),
        (700, 100, 16, {"is_causal": True}),
    ):
        gpu_cases.check(gpu_cases.inputs(T, S, N=1, H=H, B=1), **options)


def x64(_):
    jax.config.update("jax_enable_x64", True)  # for the simulation's threads too
    ids = jnp.ones((2, 40), jnp.int32)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    inputs = gpu_cases.inputs(40, 40, N=4, K=2)
    gpu_cases.check(inputs, is_causal=True, **segments)


def trials(_):
    """A trial axis, of which the keys are the same for all."""
    query, key, value = gpu_cases.inputs(70, 130, B=1)
    query, value = (jnp.stack([x, 2 * x]) for x in (query, value))

    def gradients(implementation):
        def loss(*arrays):
            return (implementation(*arrays, None, None, **structure)[0] ** 2).sum()

        structure = dict(gpu_cases.NOTHING, scale=0.25, is_causal=True)
        one = jax.grad(loss, (0, 1, 2))
        return jax.jit(jax.vmap(one, (0, None, 0)))(query, key, value)

    implementations = gpu_cases.attend, gpu_cases.reference.attend
    names = "query", "key", "value"
    got, want = (dict(zip(names, gradients(x), strict=True)) for x in implementations)
    attention_cases.check(got, want)


def hasty(_):
    """Slots that are said to be free before they have been read."""

    def wait(ring, turn):
        block, slot = gpu_rings.wait(ring, turn)
        gpu_rings.release(ring, slot, loaded=True)
        return block, slot

    gpu_kernels.wait = wait
    gpu_kernels.release = lambda *_, **__: None
    arrays = gpu_cases.inputs(100, 1000, B=1)
    options = dict(gpu_cases.NOTHING, scale=0.25)
    jax.block_until_ready(gpu_cases.attend(*arrays, None, None, **options))


def main():
    thread_map._run_jaxpr = run_jaxpr
    jax.config.update("jax_disable_most_optimizations", True)
    for case in sys.argv[1:]:
        kind, _, name = case.partition(":")
        arguments = name.split("x") if kind == "bfloat16" else [name]
        globals()[kind](*arguments)
        print("done:", case, flush=True)


if __name__ == "__main__":
    main()
