"""Where the kernels for CPUs come from, and what happens where they cannot be made."""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from processes import with_devices

from headcount import attention
from headcount.attention.kernels import cpu_build

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None, reason="no c++ on this machine"
)
on_x86_with_a_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or platform.machine() not in ("x86_64", "AMD64"),
    reason="no c++ for x86 on this machine",
)

CHOICE = """
import jax.numpy as jnp
import attention

x = jnp.ones((1, 4, 2, 8))
print(attention.resolve_implementation(x, x, x))
print(attention.dot_product_attention(x, x, x).sum())
try:
    attention.dot_product_attention(x, x, x, implementation="cpu")
except NotImplementedError as error:
    print(error)
"""


def chosen(tmp_path, **environment):
    """What a process with a cache of its own picks, and what it says of "cpu"."""
    environment = with_devices(1) | {"XDG_CACHE_HOME": str(tmp_path)} | environment
    command = [sys.executable, "-c", CHOICE]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    )
    picked, total, *told = done.stdout.splitlines()
    assert float(total) == 64
    return picked, "".join(told)


PREPROCESSOR = """#!/bin/sh
case " $* " in *" -E "*) ;; *) echo no such builtin >&2; exit 1;; esac
"""


@pytest.mark.parametrize(
    "compiler, reason",
    [
        ("none", "no C++ compiler 'none'"),
        ("false", "returned non-zero exit status 1"),
        ("old", "no such builtin"),
        pytest.param(
            *("c++ -mno-avx", "need AVX"),
            marks=[on_x86_with_a_compiler, pytest.mark.slow],
        ),
        ("'", "No closing quotation"),
    ],
)
def test_without_a_compiler(compiler, reason, tmp_path, monkeypatch):
    """`blockwise` is picked, and "cpu" says what it lacks."""
    if compiler == "old":  # it knows its macros, but cannot compile the kernels
        (tmp_path / "old").write_text(PREPROCESSOR)
        (tmp_path / "old").chmod(0o755)
        compiler = str(tmp_path / "old")
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    anew = functools.cache(cpu_build._unavailable.__wrapped__)
    monkeypatch.setattr(cpu_build, "_unavailable", anew)
    x = jnp.ones((1, 4, 2, 8))
    assert attention.resolve_implementation(x, x, x) == "blockwise"
    assert attention.dot_product_attention(x, x, x).sum() == 64
    with pytest.raises(NotImplementedError) as error:
        attention.dot_product_attention(x, x, x, implementation="cpu")
    told = str(error.value)
    assert told.startswith("implementation 'cpu' cannot be compiled here: ")
    assert reason in told and told.endswith("; use 'blockwise'")
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.slow
@needs_compiler
def test_a_compiler_is_enough(tmp_path):
    """Where there is one, the kernels compile; also if they cannot be kept."""
    assert cpu_build.unavailable() is None
    (tmp_path / "file").touch()
    assert chosen(tmp_path / "file", TMPDIR=str(tmp_path)) == ("cpu", "")
    assert [x.name for x in tmp_path.iterdir()] == ["file"]


COPYING = """#!/bin/sh
case " $* " in *" -E "*) exec c++ "$@";; esac
while [ "$1" != -o ]; do shift; done
exec cp "{library}" "$2"
"""


def copying_compiler(tmp_path) -> str:
    """A compiler that takes no time: it copies what c++ has made before."""
    path = tmp_path / "copying"
    path.write_text(COPYING.format(library=cpu_build._library()._name))
    path.chmod(0o755)
    return str(path)


@needs_compiler
@pytest.mark.slow
def test_kept_from_process_to_process(tmp_path):
    """Compiled once; a library cut short, as a crash may leave it, harms nobody."""
    compiler = copying_compiler(tmp_path)
    assert chosen(tmp_path, CXX=compiler) == ("cpu", "")
    (library,) = tmp_path.rglob("*.so")
    made, whole = library.stat().st_mtime_ns, library.stat().st_size
    assert chosen(tmp_path, CXX=compiler) == ("cpu", "")
    assert library.stat().st_mtime_ns == made
    library.write_bytes(library.read_bytes()[:4096])
    assert chosen(tmp_path, CXX=compiler) == ("cpu", "")
    assert library.stat().st_size == whole


@needs_compiler
@pytest.mark.slow
def test_a_library_that_others_could_have_written_is_not_loaded(tmp_path):
    """With the right digest beside it, too; the kernels are made for the process."""
    compiler = copying_compiler(tmp_path)
    assert chosen(tmp_path, CXX=compiler) == ("cpu", "")
    (library,) = tmp_path.rglob("*.so")
    planted = b"a library planted by another user"
    library.write_bytes(planted)
    library.with_suffix(".sha256").write_text(hashlib.sha256(planted).hexdigest())
    library.parent.chmod(0o777)
    assert chosen(tmp_path, CXX=compiler) == ("cpu", "")
    assert library.read_bytes() == planted


@pytest.mark.parametrize("digest", [b"", b"\xff\xfe", b"0" * 64, None])
def test_a_library_without_its_digest_is_made_again(tmp_path, monkeypatch, digest):
    library = tmp_path / "kernels" / "attention.so"
    library.parent.mkdir(mode=0o700)
    library.write_bytes(b"a library")
    if digest is not None:
        library.with_suffix(".sha256").write_bytes(digest)

    def compile_instead(*command):
        Path(command[command.index("-o") + 1]).write_bytes(b"made again")

    monkeypatch.setattr(cpu_build, "_run", compile_instead)
    assert cpu_build._compiled(["c++"], library) == library
    assert library.read_bytes() == b"made again" and cpu_build._is_sound(library)
    monkeypatch.delattr(cpu_build, "_run")  # which is not needed for a sound one
    assert cpu_build._compiled(["c++"], library) == library


def test_other_users_may_not_write_where_libraries_are_cached(tmp_path):
    """Whatever the umask: else no library would be loaded from there."""
    before = os.umask(0)
    try:
        cpu_build.make_private(tmp_path / "cache" / "headcount" / "verdicts")
    finally:
        os.umask(before)
    made = tmp_path / "cache" / "headcount"
    assert [x.stat().st_mode & 0o777 for x in (made.parent, made)] == [0o700] * 2
    assert cpu_build._is_trusted(made)
