"""Runs the Hopper kernels in Pallas' simulation of a GPU, for test_pallas_hopper.py.

    python -m tests.simulated_hopper feature:causal "blocks:causal segments"

Every warpgroup is a thread, and one that waits at a barrier holds one of XLA's threads,
of which there are as many as devices: too few in the tests' own process.
"""

import functools
import sys
import threading

import jax
import jax.numpy as jnp
from jax._src.pallas.mosaic.interpret import thread_map

from headcount.attention import pallas_gpu, pallas_hopper_kernels, pallas_hopper_rings
from tests import attention_cases, test_pallas_gpu

HOPPER = {"interpret": True, "hopper": True}
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
        for implementation in ("pallas_hopper_interpret", "reference")
    )
    attention_cases.check(got, want)


def blocks(name):
    """Many blocks: a case of tests/test_pallas_gpu.py."""
    arrays, options = test_pallas_gpu.CASES[name]
    test_pallas_gpu.check(arrays, **options)


def bfloat16(H, V):
    sizes = {"H": int(H), "V": int(V), "dtype": jnp.bfloat16}
    test_pallas_gpu.check(test_pallas_gpu.inputs(200, 150, **sizes), is_causal=True)


def long(_):
    """More blocks than slots, in each kernel: of three slots, and of two."""
    for T, S, H, options in (
        (100, 1000, 16, {}),
        (100, 700, 96, {"local_window_size": (60, 500)}),
        (700, 100, 16, {"is_causal": True}),
    ):
        test_pallas_gpu.check(test_pallas_gpu.inputs(T, S, H=H, B=1), **options)


def x64(_):
    jax.config.update("jax_enable_x64", True)  # for the simulation's threads too
    ids = jnp.ones((2, 40), jnp.int32)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    inputs = test_pallas_gpu.inputs(40, 40, N=4, K=2)
    test_pallas_gpu.check(inputs, is_causal=True, **segments)


def trials(_):
    """A trial axis, of which the keys are the same for all."""
    query, key, value = test_pallas_gpu.inputs(70, 130, B=1)
    query, value = (jnp.stack([x, 2 * x]) for x in (query, value))

    def gradients(implementation):
        def loss(*arrays):
            return (implementation(*arrays, None, None, **structure)[0] ** 2).sum()

        structure = dict(test_pallas_gpu.NOTHING, scale=0.25, is_causal=True)
        one = jax.grad(loss, (0, 1, 2))
        return jax.jit(jax.vmap(one, (0, None, 0)))(query, key, value)

    implementations = test_pallas_gpu.attend, test_pallas_gpu.reference.attend
    names = "query", "key", "value"
    got, want = (dict(zip(names, gradients(x), strict=True)) for x in implementations)
    attention_cases.check(got, want)


def hasty(_):
    """Slots that are said to be free before they have been read."""

    def wait(ring, turn):
        block, slot = pallas_hopper_rings.wait(ring, turn)
        pallas_hopper_rings.release(ring, slot, loaded=True)
        return block, slot

    pallas_hopper_kernels.wait = wait
    pallas_hopper_kernels.release = lambda *_, **__: None
    arrays = test_pallas_gpu.inputs(100, 1000, B=1)
    options = dict(test_pallas_gpu.NOTHING, scale=0.25)
    jax.block_until_ready(test_pallas_gpu.attend(*arrays, None, None, **options))


def main():
    thread_map._run_jaxpr = run_jaxpr
    jax.config.update("jax_disable_most_optimizations", True)
    test_pallas_gpu.attend = functools.partial(pallas_gpu.attend, **HOPPER)
    for case in sys.argv[1:]:
        kind, _, name = case.partition(":")
        arguments = name.split("x") if kind == "bfloat16" else [name]
        globals()[kind](*arguments)
        print("done:", case, flush=True)


if __name__ == "__main__":
    main()
