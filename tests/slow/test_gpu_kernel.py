"""More cases of the GPU kernels, simulated; see tests/attention/test_gpu.py."""

import pytest

from tests import attention_cases, gpu_cases
from tests.attention.test_gpu import CASES, check

# Features that cases of many blocks cover.
COVERED = ("nothing", "K < N", "causal", "causal window", "lengths", "segments")
OTHERS = [
    f"feature:{name}"
    for name in attention_cases.KERNEL_FEATURES
    if not name.startswith(("mask", "bias")) and name not in COVERED
]
OTHERS += [f"blocks:{name}" for name in gpu_cases.CASES]
OTHERS += [f"bfloat16:{size}" for size in ("8x8", "48x96", "64x128", "128x128")]
OTHERS += ["trials:", "long:"]
OTHERS = [case for case in OTHERS if case not in CASES]


@pytest.mark.parametrize("part", range(6))
def test_simulation_agrees_with_reference_without_races(part):
    check(*OTHERS[part::6])


def test_in_x64_mode():
    check("x64:")  # alone: it stays
