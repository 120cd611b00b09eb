"""The Hopper kernels in Pallas' simulation of a GPU: numbers, rings, barriers, races.

Fetches into shared memory, barriers and warpgroups are simulated, wgmma and Hopper's
layouts are not: those are compiled for an H200 in tests/compilers/test_hopper.py, and
run on one in tests/gpu/. The rest of the cases is in tests/slow/.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from headcount.attention import dot_product_attention, pallas_hopper
from tests.processes import ROOT, with_devices

CASES = ["feature:everything", "blocks:causal segments", "long:"]


def simulated(*cases):
    """What a process prints that runs these cases of tests/simulated_hopper.py."""
    command = [sys.executable, "-m", "tests.simulated_hopper", *cases]
    return subprocess.run(
        command, env=with_devices(6), cwd=ROOT, capture_output=True, text=True
    )


def check(*cases):
    result = simulated(*cases)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines() == [f"done: {case}" for case in cases]


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_no_race(case):
    check(case)


def test_a_race_would_be_told():
    assert "RACE DETECTED" in simulated("hasty:").stdout


def arrays(T=16, H=16, V=16, dtype=jnp.bfloat16):
    shapes = (1, T, 2, H), (1, T, 2, H), (1, T, 2, V)
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    "sizes, options, match",
    [
        ({"dtype": jnp.float64}, {}, "bfloat16 and float16, not float64"),
        ({"dtype": jnp.float32}, {}, "bfloat16 and float16, not float32; use 'pallas'"),
        ({"V": 192}, {}, "heads of size 128 at most, got 192"),
        ({}, {"mask": jnp.ones((1, 1, 16, 16), bool)}, "no mask, only structured"),
        ({}, {"bias": jnp.ones((1, 1, 1, 16))}, "no bias, only structured"),
    ],
)
def test_refusals(sizes, options, match, monkeypatch):
    monkeypatch.setattr("headcount.attention.api.current_platform", lambda: "gpu")

    def attend(*arrays):
        return dot_product_attention(*arrays, implementation="pallas_hopper", **options)

    with (
        jax.enable_x64("float64" in match),
        pytest.raises(NotImplementedError, match=match),
    ):
        jax.eval_shape(attend, *arrays(**sizes))


def test_needs_a_hopper(monkeypatch):
    def attend():
        array = jnp.ones((1, 16, 2, 16), jnp.bfloat16)
        return dot_product_attention(
            array, array, array, implementation="pallas_hopper"
        )

    for here in (None, 9.0):  # also beside one, on a mesh of other devices
        monkeypatch.setattr(
            "headcount.attention.api.compute_capability", lambda here=here: here
        )
        with pytest.raises(NotImplementedError, match="9.0 .*the platform is 'cpu'"):
            attend()
    monkeypatch.setattr("headcount.attention.api.current_platform", lambda: "gpu")
    monkeypatch.setattr("headcount.attention.api.compute_capability", lambda: 8.0)
    with pytest.raises(NotImplementedError, match="9.0 .*this GPU has 8.0; use 'pal"):
        attend()


def test_the_simulation_needs_threads():
    arrays = [jnp.ones((1, 16, 2, 16))] * 3
    with pytest.raises(
        NotImplementedError, match="one for ever; set XLA_FLAGS=.*count=6"
    ):
        dot_product_attention(*arrays, implementation="pallas_hopper_interpret")


def test_tiles_fit_the_sequences():
    """At least one warpgroup's rows, and no second one without any."""
    for kernel in pallas_hopper.TILES:
        for size in (8, 64, 65, 128):
            outer = "keys" if kernel == "key_value_gradient" else "queries"
            for length, rows in ((1, 64), (64, 64), (65, 128), (999, 128)):
                tiles = pallas_hopper.choose_tiles(kernel, size, length, length)
                assert getattr(tiles, outer) == rows
