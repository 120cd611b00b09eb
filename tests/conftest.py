"""The environment of every test: CPU, and programs compiled once for all processes."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers have their session's
    folder = tempfile.mkdtemp(prefix="headcount-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Also what compiles fast: thousands of small programs are met by several processes.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("TFDS_DATA_DIR", str(ROOT / ".cache" / "tfds"))
