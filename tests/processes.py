"""Processes that tests start."""

import os
import socket
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def with_devices(number: int) -> dict[str, str]:
    """The environment of a process in which the CPU is so many devices."""
    flag = f"--xla_force_host_platform_device_count={number}"
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}",
        "PYTHONPATH": str(ROOT),
    }


def free_address() -> str:
    """One of this machine, for the coordinator of several processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"
