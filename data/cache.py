"""Files in the folder of prepared data, which several processes may share."""

import contextlib
import fcntl
import http.client
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from absl import logging


def prepared_in() -> Path:
    """Return the folder of prepared data, $TFDS_DATA_DIR or its default.

    Raises:
        FileNotFoundError: its ~ stands for no folder.
    """
    folder = os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise FileNotFoundError(
            f"There is no home folder for {folder}, the folder of prepared data; set "
            f"TFDS_DATA_DIR to another."
        ) from None


def write(path: Path, content: bytes) -> None:
    """Write a file atomically; replace rather than follow a symlink of its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # not tempfile, whose files only the owner can read
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    try:
        with part.open("xb") as file:  # a new file: no link is followed
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # the disk is full
            error.filename = str(path)
        part.unlink(missing_ok=True)
        raise


def download(url: str, path: Path, otherwise: str) -> bytes:
    """Return a file's content, and download the file first if it does not exist.

    Raises:
        FileNotFoundError: the download fails. `otherwise` is the advice in the message.
    """
    if not path.is_file():
        logging.info("Downloading %s.", url)
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise FileNotFoundError(
                f"{url} can't be downloaded ({getattr(error, 'reason', error)}); "
                f"{otherwise}"
            ) from error
        write(path, content)
    return path.read_bytes()


@contextlib.contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Hold a lock file: wait until other processes release it, and remove it after."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
    held = False
    while not held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, flags, 0o666)
        except OSError as error:
            raise OSError(
                f"Prepared data can't be written to {path.parent} ({error.strerror}); "
                "set TFDS_DATA_DIR to a folder that can."
            ) from error
        try:
            fcntl.flock(number, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                held = os.path.samestat(os.fstat(number), path.stat())
            if held:  # otherwise its previous holder has removed it
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
        finally:
            os.close(number)
