"""What is set before JAX starts: XLA's flags and the cache of compiled programs."""

import hashlib
import os
from pathlib import Path


def setup() -> None:
    """Keep compiled programs from one start to the next; call before using JAX.

    They lie in $JAX_COMPILATION_CACHE_DIR, by default in the user's cache folder, apart
    for each kind of processor: a program made for another one may not run.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "headcount" / processor())
    # also what compiles fast: there are many small programs before the first step
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")


def processor() -> str:
    """A name of this machine's kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    of_kind = {line for line in lines if line.startswith(("model name", "flags"))}
    return hashlib.sha256("".join(sorted(of_kind)).encode()).hexdigest()[:12]
