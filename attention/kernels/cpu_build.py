"""Compile the C++ kernels of `attention.kernels.cpu` for this machine at first use."""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax
import jaxlib

SOURCES = [
    Path(__file__).with_name(name)
    for name in ("cpu_kernels.cc", "cpu_problem.h", "cpu_vectors.h")
]
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-w")
TARGETS = ("attention_forward", "attention_backward")

_one_at_a_time = threading.Lock()  # programs are traced in several threads


def unavailable() -> str | None:
    """Make the kernels known to XLA; None, or why there are none on this machine.

    The compiler is `$CXX`, else c++. What it made lies in the user's cache folder, by
    sources, compiler, processor and jaxlib: the first use of all takes it some seconds.
    """
    with _one_at_a_time:
        return _unavailable()


@functools.cache
def _unavailable():
    try:
        library = _library()
        for target in TARGETS:
            handler = jax.ffi.pycapsule(getattr(library, target))
            jax.ffi.register_ffi_target(target, handler, platform="cpu")
    # No compiler, or of another kind; no folder; a jaxlib that wants another interface.
    except (
        OSError,
        subprocess.SubprocessError,
        RuntimeError,
        ValueError,
        AttributeError,
    ) as error:
        told = getattr(error, "stderr", None) or error
        return " ".join(str(told).split())[:300]
    return None


def _library():
    """Loaded from the user's cache folder; if that cannot be, made for this process."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler[0]!r}")
    command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}"]
    # What -march=native stands for here, and the compiler's own version.
    macros = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    texts = (source.read_text() for source in SOURCES)
    words = [macros, *command, jaxlib.__version__, *texts]
    name = f"attention_{hashlib.sha256(''.join(words).encode()).hexdigest()[:16]}.so"
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if not root.is_absolute():  # whoever owns the current folder could plant one
            raise OSError(f"XDG_CACHE_HOME={root} is not absolute")
        return ctypes.CDLL(str(_compiled(command, root / "headcount" / name)))
    except (OSError, RuntimeError):  # not writable, not executable, no home at all
        with tempfile.TemporaryDirectory(prefix="headcount-") as folder:
            return ctypes.CDLL(str(_compiled(command, Path(folder, name))))


def _compiled(command, library):
    """Return the library's path, after compiling it if it is not there and sound.

    A damaged library would crash the process that loads it, so its digest lies beside
    it. One that others could have written is not loaded.
    """
    if _is_trusted(library.parent) and _is_sound(library):
        return library
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_trusted(library.parent):
        raise OSError(f"others may write to {library.parent}")
    handle, made = tempfile.mkstemp(dir=library.parent, suffix=".so")
    digest = library.with_suffix(".sha256")
    try:
        _run(*command, "-o", made, str(SOURCES[0]))
        os.fsync(handle)
        digest.with_suffix(f".{os.getpid()}").write_text(_digest(Path(made)))
        os.replace(digest.with_suffix(f".{os.getpid()}"), digest)
        os.replace(made, library)  # at once: another process may look for it
    finally:
        os.close(handle)
        Path(made).unlink(missing_ok=True)
    return library


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_sound(library):
    """Whether there is a library with the digest that was written beside it."""
    try:
        return library.with_suffix(".sha256").read_text() == _digest(library)
    except (OSError, ValueError):  # damaged, so that it is no text
        return False


def _is_trusted(folder):
    """Whether a folder belongs to this user, and nobody else may write to it."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
