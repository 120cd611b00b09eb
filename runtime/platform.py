"""Process settings for JAX: memory, and the cache of compiled programs."""

import contextlib
import ctypes
import hashlib
import os
import platform
from pathlib import Path

GPU_MEMORY = 0.9  # share of a GPU's memory that JAX allocates at its start
# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def setup() -> None:
    """Cache compiled programs between starts, and set memory limits.

    The cache is $JAX_COMPILATION_CACHE_DIR, by default in the user's cache folder, with
    a subfolder per kind of processor: a program compiled for another one may crash.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with contextlib.suppress(RuntimeError):  # the user has no home folder
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = root / "headcount" / fingerprint()
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # cache small programs too: many are compiled before the first step
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the variable's old name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY))
    keep_memory()


def fingerprint() -> str:
    """Return a hash that identifies the kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    of_kind = {line for line in lines if line.startswith(("model name", "flags"))}
    return hashlib.sha256("".join(sorted(of_kind)).encode()).hexdigest()[:12]


def keep_memory() -> None:
    """Let the C library keep freed memory for the next step.

    Every step allocates and frees hundreds of MB. By default glibc returns such blocks
    to the kernel at once, which then zeroes each page again: a fifth of a step on CPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_ARENA_MAX, 1)  # arenas other than the first can't grow as far
    mallopt(M_MMAP_MAX, 0)  # no blocks of their own, which free() would unmap
    mallopt(M_TRIM_THRESHOLD, -1)  # never shrink
