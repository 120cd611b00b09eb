"""The environment of the compilers' suites, and what they share: guards on a program.

Programs are compiled for devices that this machine lacks, and never run.
"""

import os
import re
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # in several workers; none has a TPU
os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-4"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
import pytest
from jax.experimental import topologies

# What is proven is the compiler's answer of today, not one that was kept.
jax.config.update("jax_enable_compilation_cache", False)
# To run what was divided among devices, interpreted.
jax.config.update("jax_num_cpu_devices", 8)

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?=[-(.])"
)


@pytest.fixture
def compile_fast():
    """Let XLA try less to make the step fast; it needs more memory, if anything."""
    before = jax.config.jax_exec_time_optimization_effort
    jax.config.update("jax_exec_time_optimization_effort", -1.0)
    yield
    jax.config.update("jax_exec_time_optimization_effort", before)


@pytest.fixture
def compile_for():
    """compile_for(devices, mesh_shape, function, arrays) -> the compiled program.

    `arrays` is a dict of (shape, dtype, PartitionSpec) over the mesh's axes "trial",
    "data" and "model".
    """

    def compile_for(devices, mesh_shape, function, arrays):
        count = int(np.prod(mesh_shape))
        mesh = jax.sharding.Mesh(
            np.array(devices[:count]).reshape(mesh_shape),
            ("trial", "data", "model"),
            axis_types=(jax.sharding.AxisType.Auto,) * 3,
        )
        structs = {
            name: jax.ShapeDtypeStruct(
                shape, dtype, sharding=jax.NamedSharding(mesh, spec)
            )
            for name, (shape, dtype, spec) in arrays.items()
        }
        with jax.set_mesh(mesh):
            return jax.jit(function).lower(structs).compile()

    return compile_for


@pytest.fixture(scope="session")
def devices():
    """devices(platform, topology_name, **options) -> the devices of a topology."""

    def devices(platform, topology_name, **options):
        return topologies.get_topology_desc(
            platform=platform, topology_name=topology_name, **options
        ).devices

    return devices


@pytest.fixture
def scratch_bytes():
    """What a program holds on a device beside its arguments and results."""

    def scratch_bytes(compiled):
        memory = compiled.memory_analysis()
        return (
            memory.peak_memory_in_bytes
            - memory.argument_size_in_bytes
            - memory.output_size_in_bytes
        )

    return scratch_bytes


@pytest.fixture
def collectives():
    """The kinds of communication in a program's text."""

    def collectives(compiled):
        return set(COLLECTIVE.findall(compiled.as_text()))

    return collectives
