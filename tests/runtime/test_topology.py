"""What is known of devices that are not attached."""

from headcount.attention.platform import CAPABILITIES
from headcount.runtime import topology


def test_attention_knows_the_compute_capability_of_every_gpu():
    """`attention` and `runtime` can't import each other, so both state it."""
    gpus = topology.GPUS.items()
    assert {f"NVIDIA {n.upper()}": gpu.capability for n, gpu in gpus} == CAPABILITIES
