"""What is set before JAX starts: memory, and the cache of compiled programs."""

import contextlib
import ctypes
import hashlib
import os
import platform
from pathlib import Path

GPU_MEMORY = 0.9  # the share of a GPU's that JAX takes at its start, and no more later
# malloc.h of glibc
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def setup() -> None:
    """Keep compiled programs from one start to the next; call before using JAX.

    They lie in $JAX_COMPILATION_CACHE_DIR, by default in the user's cache folder if
    there is one, apart for each kind of processor: a program made for another one may
    not run.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with contextlib.suppress(RuntimeError):  # a user without a home folder
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = root / "headcount" / fingerprint()
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # also what compiles fast: there are many small programs before the first step
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its old name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY))
    keep_memory()


def fingerprint() -> str:
    """Of this machine's kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    of_kind = {line for line in lines if line.startswith(("model name", "flags"))}
    return hashlib.sha256("".join(sorted(of_kind)).encode()).hexdigest()[:12]


def keep_memory() -> None:
    """Let the C library keep what is freed, for the next step to use again.

    Every step takes and frees hundreds of MB. glibc gives such blocks back to the
    kernel at once, which has to zero each page anew: a fifth of a step on CPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_ARENA_MAX, 1)  # other arenas than the first cannot grow so far
    mallopt(M_MMAP_MAX, 0)  # no blocks of their own, which would be unmapped
    mallopt(M_TRIM_THRESHOLD, -1)  # never shrink
