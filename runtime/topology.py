"""Devices that this machine lacks, described well enough for their real compilers.

libtpu compiles for TPUs and jax-cuda13-plugin for NVIDIA GPUs on a machine with
neither; requirements-compilers.txt installs both. Nothing can run on such devices.
"""

import importlib.util
import os
import re
from typing import NamedTuple

import jax
import numpy as np


class Chip(NamedTuple):
    """What a chip can, by its maker's data sheet."""

    flops: float  # a second, dense bfloat16
    memory: int  # bytes
    bandwidth: float  # of that memory, bytes a second
    kinds: tuple[str, ...]  # what JAX calls the device's kind


CHIPS = {  # by the whole name: an H100 PCIe, an H200 NVL or a part (MIG) has less
    "v4": Chip(275e12, 32 * 2**30, 1.23e12, ("TPU v4",)),
    "v5e": Chip(197e12, 16 * 2**30, 0.82e12, ("TPU v5 lite", "TPU v5e")),
    "v5p": Chip(459e12, 95 * 2**30, 2.77e12, ("TPU v5", "TPU v5p")),
    "v6e": Chip(918e12, 32 * 2**30, 1.64e12, ("TPU v6 lite", "TPU v6e")),
    "h100": Chip(989e12, 80 * 10**9, 3.35e12, ("NVIDIA H100 80GB HBM3",)),
    "h200": Chip(989e12, 141 * 10**9, 4.8e12, ("NVIDIA H200",)),
}
GPUS = {"h100": 50, "h200": 60}  # MiB of L2 cache

# Read off an H200; figures of NVIDIA's data sheets where they give them.
HOPPER = """
gpu_device_info {
  cuda_compute_capability {
    major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES
  }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  memory_bandwidth: %d
  l2_cache_size: %d
  device_memory_size: %d
}
platform_name: "CUDA"
device_description_str: "NVIDIA %s"
dnn_version_info { major: 9 minor: 12 }
"""


def devices(target: str) -> np.ndarray:
    """The devices of a target: `v5e:16x16`, `v6e:2x2`, `v5p:2x2x1`, `h200:8`.

    Raises:
        ValueError: no such target, or its compiler is not installed.
    """
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)*)", target)
    chip, shape = match.groups() if match else (target, "")
    if match is None or chip not in CHIPS:
        raise ValueError(
            f"There is no target {target!r}; write v5e:16x16, v6e:2x2, v5p:2x2x1 or "
            f"h200:8 (chip and topology)."
        )
    from jax.experimental import topologies

    if chip in GPUS:
        known = CHIPS[chip]
        sizes = known.bandwidth, GPUS[chip] * 2**20, known.memory
        options = {
            "target_config": HOPPER % (*sizes, chip.upper()),
            "topology": f"1x1x{shape}",  # of one host
        }
        platform, name = "cuda", chip
    else:
        # else libtpu looks for the machine it stands in, and waits
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        platform, name, options = "tpu", target, {}
        if chip == "v4":  # whose two cores work as one device
            options["chip_config_name"] = "megacore"
    try:
        found = topologies.get_topology_desc(name, platform, **options)
    except Exception as error:
        if "lockfile" in str(error):
            raise ValueError(
                f"{target} can't be compiled for now: another process is at the TPU's "
                f"compiler on this machine; wait for it."
            ) from error
        package = "jax_cuda13_plugin" if chip in GPUS else "libtpu"
        mend = "pip install -r requirements-compilers.txt brings the compilers"
        if importlib.util.find_spec(package):
            mend = "choose a topology that there is, such as v5e:16x16 or h200:8"
        raise ValueError(
            f"{target} can't be compiled for here: {str(error).splitlines()[0]} "
            f"({mend})."
        ) from error
    return np.array(found.devices)


def compile_for(devices: np.ndarray, function, *arguments, **options):
    """Compile a jitted function for the first of the devices.

    Args:
        devices: of a target.
        function: as `jax.jit` gives it.
        arguments: trees of arrays or `jax.ShapeDtypeStruct`s.
        options: of the compiler.
    """
    device = devices.flat[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("data",))
    here = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), arguments
    )
    platform = "tpu" if device.platform == "tpu" else "cuda"
    with jax.set_mesh(mesh):
        traced = function.trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        return lowered.compile(compiler_options=options)
