"""The compilation target, which need not be this machine, and its number of cores."""

import os
import re

import jax


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": the target of compilation.

    It is the platform of the mesh set with `jax.set_mesh`, as when compiling ahead of
    time for other devices, else JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """Return the local NVIDIA GPU's compute capability, such as 8.9, or None."""
    if jax.default_backend() != "gpu":
        return None
    told = str(getattr(jax.devices()[0], "compute_capability", None))
    return float(told) if re.fullmatch(r"[0-9]+\.[0-9]+", told) else None


def cores() -> int:
    """Return the number of processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
