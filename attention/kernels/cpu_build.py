"""Compile the C++ kernels of `attention.kernels.cpu` on first use."""

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
TARGETS = tuple(
    f"attention_{name}_{dtype}"
    for name in ("forward", "backward")
    for dtype in ("float32", "bfloat16")
)

_one_at_a_time = threading.Lock()  # several threads may trace programs


def unavailable() -> str | None:
    """Register the kernels with XLA; return None, or the reason if that fails.

    The compiler is `$CXX`, else c++. The library is cached in the user's cache folder
    by sources, compiler, processor and jaxlib version, so only the first call on a
    machine takes the few seconds to compile.
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
    # No compiler or an incompatible one, no folder, or another FFI version in jaxlib.
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


def cache_folder() -> Path:
    """Return this package's folder in the user's cache.

    Raises:
        OSError: $XDG_CACHE_HOME is relative.
        RuntimeError: the user has no home.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not root.is_absolute():  # the owner of the working directory could plant one
        raise OSError(f"XDG_CACHE_HOME={root} is not absolute")
    return root / "headcount"


def make_private(folder: Path) -> None:
    """Make a folder and its parents, which other users may not write to."""
    for level in reversed((folder, *folder.parents)):  # `parents=True` ignores the mode
        level.mkdir(exist_ok=True, mode=0o700)


def _library():
    """Load the library from the user's cache, else compile it for this process only."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler {compiler[0]!r}")
    command = [*compiler, *FLAGS, f"-I{jax.ffi.include_dir()}"]
    # These include the meaning of -march=native here and the compiler's version.
    macros = _run(*compiler, *FLAGS, "-dM", "-E", "-x", "c++", os.devnull)
    texts = (source.read_text() for source in SOURCES)
    words = [macros, *command, jaxlib.__version__, *texts]
    name = f"attention_{hashlib.sha256(''.join(words).encode()).hexdigest()[:16]}.so"
    try:
        return ctypes.CDLL(str(_compiled(command, cache_folder() / name)))
    except (OSError, RuntimeError):  # not writable, not executable, no home at all
        with tempfile.TemporaryDirectory(prefix="headcount-") as folder:
            return ctypes.CDLL(str(_compiled(command, Path(folder, name))))


def _compiled(command, library):
    """Compile the library unless an intact one exists, and return its path.

    Loading a damaged library would crash the process, so its digest is stored beside
    it. A library that other users could have written is not loaded.
    """
    if _is_trusted(library.parent) and _is_sound(library):
        return library
    make_private(library.parent)
    if not _is_trusted(library.parent):
        raise OSError(f"others may write to {library.parent}")
    handle, made = tempfile.mkstemp(dir=library.parent, suffix=".so")
    digest = library.with_suffix(".sha256")
    try:
        _run(*command, "-o", made, str(SOURCES[0]))
        os.fsync(handle)
        digest.with_suffix(f".{os.getpid()}").write_text(_digest(Path(made)))
        os.replace(digest.with_suffix(f".{os.getpid()}"), digest)
        os.replace(made, library)  # atomic: other processes may look for it
    finally:
        os.close(handle)
        Path(made).unlink(missing_ok=True)
    return library


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_sound(library):
    """Return whether the library exists and matches its stored digest."""
    try:
        return library.with_suffix(".sha256").read_text() == _digest(library)
    except (OSError, ValueError):  # missing, or a damaged digest that is not text
        return False


def _is_trusted(folder):
    """Return whether this user owns the folder and nobody else may write to it."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
