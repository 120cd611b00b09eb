"""What is compiled for, which need not be the machine that traces."""

import jax


def platform() -> str:
    """ "cpu", "gpu" or "tpu": of the mesh set with `jax.set_mesh`, else the default.

    An ahead-of-time compilation for another platform sets a mesh of its devices.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
