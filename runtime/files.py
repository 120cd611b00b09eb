"""Write files so that a kill, a full disk or a planted link can't do harm."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically; a link of its name is replaced, not followed.

    The content goes to a new file beside it, which then takes its name. A kill leaves
    that file, named `.NAME.*.part`, to `remove_parts`.
    """
    if isinstance(content, str):
        content = content.encode()
    part, number = _create_part(path)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
            file.flush()
            part.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # the disk is full
            error.filename = str(path)
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _create_part(path: Path) -> tuple[Path, int]:
    """Create and lock a new file; return its path and descriptor."""
    while True:
        part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        number = os.open(part, flags, 0o666)
        fcntl.flock(number, fcntl.LOCK_EX)
        if os.fstat(number).st_nlink:  # else removed before it was locked
            return part, number
        os.close(number)


def remove_parts(folder: Path) -> None:
    """Remove the files that killed processes left half-written in a folder."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            number = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody writes it
                part.unlink()
            finally:
                os.close(number)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that takes the name of `folder` when the block has succeeded.

    Raises:
        ValueError: there is something of that name that is not an empty folder.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose another folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as parent:
        part = Path(parent) / folder.name
        part.mkdir()
        yield part
        if folder.exists():
            folder.rmdir()
        part.rename(folder)


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, which is made if there is none, without changing it.

    Raises:
        ValueError: it is a link, which might lead to any file.
    """
    return os.fdopen(_open(path, os.O_RDWR), "r+")


def open_append(path: Path) -> IO[str]:
    """Open a text file to append lines to; it is made if there is none.

    Raises:
        ValueError: it is a link, which might lead to any file.
    """
    number = _open(path, os.O_WRONLY | os.O_APPEND)
    return os.fdopen(number, "a", buffering=1)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise ValueError(f"{path} must not be a link; remove it.") from error
        raise


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[IO[str] | None]:
    """Lock a file; yield it, or None if another process has the lock.

    The kernel releases the lock when the last process that has the file open ends, in
    whatever way. A child process that inherits the file keeps the lock. Who has the
    lock may remove the file.
    """
    held = False
    while not held:
        with open_lock(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            held = _is_at(path, file)  # else removed before it was locked
            if held:
                yield file


def _is_at(path: Path, file: IO[str]) -> bool:
    """Whether an open file is the one of a name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
