"""How much memory the devices of a run have."""

import contextlib
from pathlib import Path

import jax

CGROUP = Path("/sys/fs/cgroup/memory.max")  # of a container


def total_memory() -> int | None:
    """Return the memory of all devices of a run, in bytes; None if it is not known.

    Devices on a CPU share the memory of their host.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        host = host_memory()
        return None if host is None else host * jax.process_count()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else limit * jax.device_count()


def host_memory() -> int | None:
    """Return the memory and swap of this host, or of its container, in bytes."""
    info = Path("/proc/meminfo")
    if not info.exists():  # not Linux
        return None
    rows = (line.split() for line in info.read_text().splitlines())
    found = {row[0]: 1024 * int(row[1]) for row in rows if len(row) == 3}
    total = found["MemTotal:"] + found["SwapTotal:"]
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file
        total = min(total, int(CGROUP.read_text()) + found["SwapTotal:"])
    return total
