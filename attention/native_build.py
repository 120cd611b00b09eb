"""The kernels of `attention.native`, compiled for this machine when first asked for."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax

SOURCES = [
    Path(__file__).with_name(name)
    for name in ("native_kernels.cc", "native_problem.h", "native_vectors.h")
]
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
TARGETS = ("attention_forward", "attention_backward")


@functools.cache
def why_not() -> str | None:
    """Make the kernels known to XLA; None, or why there are none on this machine.

    The compiler is `$CXX`, else c++. What it made lies in the user's cache folder, by
    sources, compiler and processor: the first use of all takes it some seconds.
    """
    try:
        library = ctypes.CDLL(str(_compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", None) or error
        return " ".join(str(told).split())[:300]
    for target in TARGETS:
        handler = jax.ffi.pycapsule(getattr(library, target))
        jax.ffi.register_ffi_target(target, handler, platform="cpu")
    return None


def _compiled():
    """The library's path."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler[0]!r}")
    command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}"]
    # What -march=native stands for here, and the compiler's own version.
    macros = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    words = [macros, *command, *(source.read_text() for source in SOURCES)]
    name = hashlib.sha256("".join(words).encode()).hexdigest()[:16]
    for folder in _folders():
        library = folder / f"attention_{name}.so"
        if library.exists():
            return library
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle, made = tempfile.mkstemp(dir=folder, suffix=".so")
        except OSError:
            continue
        os.close(handle)
        try:
            _run(*command, "-o", made, str(SOURCES[0]))
            os.replace(made, library)  # at once: another process may look for it
        finally:
            Path(made).unlink(missing_ok=True)
        return library
    raise PermissionError("no folder for the compiled kernels can be written")


def _folders():
    """Where it may lie: for all processes of this user, else for this one."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield root / "headcount"
    yield Path(tempfile.mkdtemp(prefix="headcount-"))


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
