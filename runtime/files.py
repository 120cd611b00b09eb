"""Write files safely: in spite of kills, full disks and planted symlinks."""

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def write(path: Path, content: str | bytes) -> None:
    """Write a file atomically; replace a symlink at its path instead of following it.

    The content is written to a new file beside it, which is then renamed. If the
    process is killed, that file, `.NAME.*.part`, is left for `remove_parts`.
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
        if isinstance(error, OSError) and error.filename is None:  # e.g. a full disk
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
        if os.fstat(number).st_nlink:  # not removed before it was locked
            return part, number
        os.close(number)


def check_output(name: str, path: Path) -> None:
    """Raise a ValueError unless a file can be written, before long work starts.

    Args:
        name: what the user typed, as in --output=FILE or --workdir=FOLDER.
        path: the file.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{name}: {path} must be a file in an existing folder.")
    # The file would be replaced, which is not intended for /dev/null, /dev/stdout.
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise ValueError(f"{name}: {path} must be a regular file, or a new one.")
    try:
        part, number = _create_part(path)  # for root, permissions alone allow all
        part.unlink()
        os.close(number)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{name}: {path} can't be written ({error.strerror}); change that, or use "
            f"another folder."
        ) from None


def remove_parts(folder: Path) -> None:
    """Remove incomplete files that killed processes left in a folder."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            number = os.open(part, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # fails if a process is still writing the file
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()
            finally:
                os.close(number)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `folder` if the block succeeds.

    Raises:
        ValueError: `folder` is not an empty or new folder, or is the current one.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; choose another folder.")
    if folder.name in ("", ".."):  # of the path "."
        raise ValueError(f"{folder} can't be replaced; give the name of a new folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as parent:
        part = Path(parent) / folder.name
        part.mkdir()
        yield part
        if folder.exists():
            folder.rmdir()
        part.rename(folder)


def open_append(path: Path) -> IO[str]:
    """Open a text file to append lines to it; create it if there is none.

    Raises:
        ValueError: it is a symlink, which might point to any file.
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

    The kernel releases the lock when the last process that has the file open ends, for
    whatever reason. A child process that inherits the file keeps the lock. The holder
    of the lock may remove the file.

    Args:
        path: the lock file.
        wait: whether to wait for the lock, so that None is never yielded.

    Raises:
        ValueError: it is a symlink, which might point to any file.
    """
    held = False
    while not held:
        with os.fdopen(_open(path, os.O_RDWR), "r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield None
                return
            held = _is_at(path, file)  # False if removed before it was locked
            if held:
                yield file


def _is_at(path: Path, file: IO[str]) -> bool:
    """Return whether an open file is the one at a path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
