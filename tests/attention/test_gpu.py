"""The GPU kernels in Pallas' simulation: numbers, rings, barriers, races.

Fetches into shared memory, barriers and warpgroups are simulated; wgmma and Hopper's
layouts are not. Those are compiled for an H200 in tests/compilers/test_gpu.py, and run
on one in tests/gpu/. More cases are in tests/slow/.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import dot_product_attention
from headcount.attention.kernels import gpu
from tests.processes import ROOT, with_devices

CASES = ["feature:everything"]


def simulated(*cases):
    """Run these cases of tests/simulated_gpu.py in a process of their own."""
    command = [sys.executable, "-m", "tests.simulated_gpu", *cases]
    return subprocess.run(
        command, env=with_devices(6), cwd=ROOT, capture_output=True, text=True
    )


def check(*cases):
    result = simulated(*cases)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == [f"done: {case}" for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_simulation_agrees_with_reference_without_races(case):
    check(case)


@pytest.mark.slow
def test_simulation_detects_a_race():
    assert "RACE DETECTED" in simulated("hasty:").stdout


def arrays(T=16, H=16, V=16, dtype=jnp.bfloat16):
    shapes = (1, T, 2, H), (1, T, 2, H), (1, T, 2, V)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    "sizes, options, match",
    [
        ({"dtype": jnp.float64}, {}, "float64"),
        ({"dtype": jnp.float32}, {}, "float32"),
        ({"V": 192}, {}, "query and value with head sizes up to 128, got 192"),
        ({}, {"mask": jnp.ones((1, 1, 16, 16), bool)}, "no mask, only is_causal"),
        ({}, {"bias": jnp.ones((1, 1, 1, 16))}, "no bias, only is_causal"),
    ],
)
def test_unsupported_arguments_name_the_argument(sizes, options, match, monkeypatch):
    monkeypatch.setattr(gpu, "platform", lambda: "gpu")

    def attend(*arrays):
        return dot_product_attention(*arrays, implementation="gpu", **options)

    with (
        jax.enable_x64("float64" in match),
        pytest.raises(NotImplementedError, match=match),
    ):
        jax.eval_shape(attend, *arrays(**sizes))


def test_needs_compute_capability_9(monkeypatch):
    def attend():
        array = jnp.ones((1, 16, 2, 16), jnp.bfloat16)
        return dot_product_attention(array, array, array, implementation="gpu")

    with pytest.raises(NotImplementedError, match="'cpu'"):
        attend()
    monkeypatch.setattr(gpu, "platform", lambda: "gpu")
    monkeypatch.setattr(gpu, "compute_capability", lambda: 8.0)
    with pytest.raises(NotImplementedError, match="9.0.*8.0"):
        attend()
    # a GPU that is here and has none is not NVIDIA's
    monkeypatch.setattr(gpu, "compute_capability", lambda: None)
    assert gpu.unsupported_device() is None, "compiled for another machine"
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "9.0" in gpu.unsupported_device()


def test_simulation_needs_threads():
    arrays = [jnp.ones((1, 16, 2, 16))] * 3
    with pytest.raises(NotImplementedError, match="XLA_FLAGS=.*count=6"):
        dot_product_attention(*arrays, implementation="gpu_interpret")
