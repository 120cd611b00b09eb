"""The compilation target, which need not be this machine."""

import re

import jax

# GPUs that programs are compiled for on machines without them: by JAX's device kind.
CAPABILITIES = {"NVIDIA A100": 8.0, "NVIDIA H100": 9.0, "NVIDIA H200": 9.0}


def platform() -> str:
    """Return "cpu", "gpu" or "tpu": the target of compilation.

    It is the platform of the mesh set with `jax.set_mesh`, as when compiling ahead of
    time for other devices, else JAX's default backend.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def compute_capability() -> float | None:
    """Return an NVIDIA GPU's compute capability, such as 8.9, or None.

    It is that of the local GPU, else of the known GPU that the mesh names.
    """
    if jax.default_backend() != "gpu":
        device = jax.sharding.get_abstract_mesh().abstract_device
        return None if device is None else CAPABILITIES.get(device.device_kind)
    capability = str(getattr(jax.devices()[0], "compute_capability", None))
    return float(capability) if re.fullmatch(r"[0-9]+\.[0-9]+", capability) else None
