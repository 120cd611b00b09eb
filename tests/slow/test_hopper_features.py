"""All else that the Hopper kernels take, simulated: see tests/test_pallas_hopper.py."""

import pytest

from tests import attention_cases, test_pallas_gpu
from tests.test_pallas_hopper import CASES, check

OTHERS = [
    f"feature:{name}"
    for name in attention_cases.FEATURES
    if not name.startswith(("mask", "bias"))
]
OTHERS += [
    f"blocks:{name}"
    for name, (_, options) in test_pallas_gpu.CASES.items()
    if not options.keys() & {"mask", "bias"}
]
OTHERS += [f"bfloat16:{size}" for size in ("8x8", "48x96", "64x128", "128x128")]
OTHERS += ["trials:"]
OTHERS = [case for case in OTHERS if case not in CASES]


@pytest.mark.parametrize("part", range(6))
def test_numbers_and_no_race(part):
    check(*OTHERS[part::6])


def test_in_x64_mode():
    check("x64:")  # alone: it stays
