"""Processes that tests start."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Tests compile more than they compute.
FAST = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def with_devices(number: int, flags: str = "") -> dict[str, str]:
    """The environment of a process in which the CPU is so many devices."""
    flag = f"{flags} --xla_force_host_platform_device_count={number}"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }


def free_address() -> str:
    """One of this machine, for the coordinator of several processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def repeats(default: int) -> int:
    """How often a test of faults repeats them: HEADCOUNT_FAULTS, or a few times."""
    return int(os.environ.get("HEADCOUNT_FAULTS", default))
