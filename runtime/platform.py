"""Process settings for JAX: memory, and the cache of compiled programs."""

import contextlib
import ctypes
import hashlib
import os
import platform
import sys
from pathlib import Path

OPEN_FILES = 256  # open files that a run may need at the same time
FOLDERS = ("JAX_COMPILATION_CACHE_DIR", "XDG_CACHE_HOME")  # variables with a folder
GPU_MEMORY = 0.9  # fraction of a GPU's memory that JAX preallocates
SMALL = ("eval.py", "predict.py", "heads.py", "weights.py")  # which do not preallocate
CPUINFO = Path("/proc/cpuinfo")
# lines of it that tell processor models apart, on x86 and on ARM
KIND = ("model name", "flags", "CPU implementer", "CPU part", "Features")
# from glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


def check_environment() -> None:
    """Exit with code 2 and a message if scripts can't run in this environment."""
    wrong = unusable_environment()
    if wrong is not None:
        print(f"{Path(sys.argv[0]).name}: {wrong}", file=sys.stderr, flush=True)
        sys.exit(2)


def unusable_environment() -> str | None:
    """Return an error message if the environment must be changed, else None.

    If possible, raise a limit of open files that is too low.
    """
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
            return (
                f"At most {hard} files may be open at once, and {OPEN_FILES} are "
                f"needed; raise the limit, as with ulimit -n {OPEN_FILES}."
            )
        if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
            resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    if os.environ.get("JAX_DISABLE_JIT", "0").lower() not in ("", "0", "false", "off"):
        return "JAX_DISABLE_JIT is set, and nothing here runs without jit; unset it."
    for name in FOLDERS:
        value = os.environ.get(name, "")
        # a relative path would create a cache in every working directory
        if value and "://" not in value and not os.path.isabs(value):
            return f"{name}={value} must be an absolute path."
    return None


def setup() -> None:
    """Enable JAX's persistent compilation cache, and configure memory.

    The cache is $JAX_COMPILATION_CACHE_DIR. By default it is in the user's cache
    folder, with a subfolder per processor model: a program compiled for another
    processor may crash.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        with contextlib.suppress(RuntimeError):  # the user has no home folder
            root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = root / "headcount" / fingerprint()
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
    # cache small programs, too: many are compiled before the first step
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # the variable's old name
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(GPU_MEMORY))
    if Path(sys.argv[0]).name in SMALL:  # leave memory to training
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_gpu or os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        keep_memory()


def fingerprint() -> str:
    """Return a hash that identifies the processor model and its features."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    of_kind = {line for line in lines if line.startswith(KIND)}
    return hashlib.sha256("".join(sorted(of_kind)).encode()).hexdigest()[:12]


def keep_memory() -> None:
    """Let the C library keep freed memory for the next step.

    Every step allocates and frees hundreds of MB. By default glibc returns such blocks
    to the kernel at once, which then zeroes each page again: a fifth of a step on CPU.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(M_ARENA_MAX, 1)  # only the main arena: others can't grow as large
    mallopt(M_MMAP_MAX, 0)  # don't use mmap for large blocks: free() would unmap them
    mallopt(M_TRIM_THRESHOLD, -1)  # never return memory to the kernel
