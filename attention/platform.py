"""What is compiled for, which need not be the machine that traces; and its cores."""

import os
import re

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu": of the mesh set with `jax.set_mesh`, else the default.

    An ahead-of-time compilation for another platform sets a mesh of its devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """Of the NVIDIA GPU at hand, as 8.9; None where there is none."""
    if jax.default_backend() != "gpu":
        return None
    told = str(getattr(jax.devices()[0], "compute_capability", None))
    return float(told) if re.fullmatch(r"[0-9]+\.[0-9]+", told) else None


def cores() -> int:
    """How many cores of the processor this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
