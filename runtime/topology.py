"""Descriptions of devices that are not attached, for ahead-of-time compilation.

libtpu compiles for TPUs and jax-cuda13-plugin for NVIDIA GPUs even on a machine without
them; requirements-compilers.txt installs both. Programs can't run on such devices.
"""

import importlib.util
import os
import re
from typing import NamedTuple

import jax
import numpy as np


class Chip(NamedTuple):
    """The specifications of a chip, from its vendor's data sheet."""

    flops: float  # per second, dense bfloat16
    memory: int  # bytes
    bandwidth: float  # of that memory, bytes per second
    kinds: tuple[str, ...]  # JAX's `device_kind`


# `kinds` are full names: an H100 PCIe, an H200 NVL or a part of a GPU (MIG) is slower.
CHIPS = {
    "v4": Chip(275e12, 32 * 2**30, 1.23e12, ("TPU v4",)),
    "v5e": Chip(197e12, 16 * 2**30, 0.82e12, ("TPU v5 lite", "TPU v5e")),
    "v5p": Chip(459e12, 95 * 2**30, 2.77e12, ("TPU v5", "TPU v5p")),
    "v6e": Chip(918e12, 32 * 2**30, 1.64e12, ("TPU v6 lite", "TPU v6e")),
    "a100": Chip(312e12, 80 * 10**9, 2.04e12, ("NVIDIA A100-SXM4-80GB",)),
    "h100": Chip(989e12, 80 * 10**9, 3.35e12, ("NVIDIA H100 80GB HBM3",)),
    "h200": Chip(989e12, 141 * 10**9, 4.8e12, ("NVIDIA H200",)),
}


class GPU(NamedTuple):
    """What XLA's compiler must know of a GPU besides `Chip`."""

    capability: float  # as in `attention.platform`, which imports nothing from here
    cores: int
    fpus: int  # per core
    clock: float  # GHz
    block_memory: int  # largest shared memory of a block, bytes
    core_memory: int  # shared memory of a core, bytes
    l2_cache: int  # bytes


# From NVIDIA's data sheets where they give the value, otherwise Hopper's are read from
# an H200.
GPUS = {
    "a100": GPU(8.0, 108, 64, 1.41, 166912, 167936, 40 * 2**20),
    "h100": GPU(9.0, 132, 128, 1.98, 232448, 233472, 50 * 2**20),
    "h200": GPU(9.0, 132, 128, 1.98, 232448, 233472, 60 * 2**20),
}
DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: 0 {features} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {gpu.block_memory}
  shared_memory_per_core: {gpu.core_memory}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: {gpu.clock}
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {gpu.l2_cache}
  device_memory_size: {chip.memory}
}}
platform_name: "CUDA"
device_description_str: "NVIDIA {name}"
dnn_version_info {{ major: 9 minor: 12 }}
"""


def devices(target: str) -> np.ndarray:
    """Return the devices of a target: `v5e:16x16`, `v6e:2x2`, `v5p:2x2x1`, `h200:8`.

    Raises:
        ValueError: there is no such target, or its compiler is missing or in use.
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
        name = chip.upper()
        major = int(GPUS[chip].capability)
        features = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
        fields = {"gpu": GPUS[chip], "chip": CHIPS[chip], "name": name}
        options = {
            "target_config": DESCRIPTION.format(
                **fields, major=major, features=features
            ),
            "topology": f"1x1x{shape}",  # a single host
        }
        platform, name = "cuda", chip
    else:
        # otherwise libtpu queries the machine's TPU metadata, and waits
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        platform, name, options = "tpu", target, {}
        if chip == "v4":  # its two cores form one device
            options["chip_config_name"] = "megacore"
    try:
        topology = topologies.get_topology_desc(name, platform, **options)
    except Exception as error:
        if "lockfile" in str(error):
            raise ValueError(
                f"{target} can't be compiled for now: another process is using the "
                f"TPU's compiler on this machine; retry when it is done."
            ) from error
        package = "jax_cuda13_plugin" if chip in GPUS else "libtpu"
        fix = "pip install -r requirements-compilers.txt brings the compilers"
        if importlib.util.find_spec(package):
            fix = "choose an existing topology, such as v5e:16x16 or h200:8"
        raise ValueError(
            f"{target} can't be compiled for here: {str(error).splitlines()[0]} "
            f"({fix})."
        ) from error
    return np.array(topology.devices)


def compile_for(devices: np.ndarray, function, *arguments, **options):
    """Compile a jitted function for the first of the devices.

    Args:
        devices: devices of a target.
        function: a function from `jax.jit`.
        arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
        options: compiler options.
    """
    device = devices.flat[0]
    mesh = jax.sharding.Mesh(np.array([device]), ("data",))
    replicated = jax.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated), arguments
    )
    platform = "tpu" if device.platform == "tpu" else "cuda"
    with jax.set_mesh(mesh):
        traced = function.trace(*arguments)
        lowered = traced.lower(lowering_platforms=(platform,))
        return lowered.compile(compiler_options=options)
