"""The memory of a run's devices."""

import contextlib
from pathlib import Path

import jax

CGROUP = Path("/sys/fs/cgroup/memory.max")  # limit of a container


def total_memory() -> int | None:
    """Return the total memory of a run's devices in bytes, or None if unknown.

    CPU devices share the memory of their host.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        host = host_memory()
        return None if host is None else host * jax.process_count()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * jax.device_count()


def host_memory() -> int | None:
    """Return the memory and swap of this host or container in bytes, or None."""
    info = Path("/proc/meminfo")
    if not info.exists():  # not Linux
        return None
    rows = (line.split() for line in info.read_text().splitlines())
    sizes = {row[0]: 1024 * int(row[1]) for row in rows if len(row) == 3}
    total = sizes["MemTotal:"] + sizes["SwapTotal:"]
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file
        total = min(total, int(CGROUP.read_text()) + sizes["SwapTotal:"])
    return total
