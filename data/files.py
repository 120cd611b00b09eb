"""Local files of a corpus: UTF-8 text, gzipped or not, in the folder data.directory."""

import gzip
import os
import re
import zlib
from pathlib import Path

# Names of splits in published files.
SPLITS = {"train": ("train",), "val": ("val", "dev"), "test": ("test",)}
SUFFIXES = (".conllu", ".conll", ".txt", ".annotated", ".tsv")


def folder_of(name: str, directory: str | None) -> Path:
    """Return the folder data.directory of the corpus `name`.

    Raises:
        ValueError: `directory` is None.
        FileNotFoundError: there is no such folder.
    """
    if directory is None:
        raise ValueError(
            f"data.name={name} needs data.directory, the folder of your files "
            f"(eval.py and heads.py: --directory)."
        )
    folder = Path(os.path.expanduser(directory))
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} (data.directory).")
    return folder


def find_file(folder: Path, split: str) -> Path:
    """Return the file of a split: a word in its name starts with a name of the split.

    Raises:
        ValueError, OSError: there is no file for the split, or more than one.
    """
    names = SPLITS.get(split, (split,))
    files = [path for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES]
    # at the start of a word, so that an evaluation set is not "val"
    pattern = re.compile(rf"(?<![a-z])({'|'.join(map(re.escape, names))})", re.I)
    matching = [path for path in files if pattern.search(path.name)]
    if not matching:
        listed = ", ".join(path.name for path in files) or "no such file"
        raise FileNotFoundError(
            f"The folder {folder} has no file for the split {split!r}: a word in its "
            f"name must start with {' or '.join(names)}, and the name must end in "
            f"{', '.join(SUFFIXES)}. It holds {listed}."
        )
    if len(matching) > 1:
        listed = ", ".join(path.name for path in matching)
        raise ValueError(
            f"{folder} has several files for the split {split!r}: {listed}."
        )
    return matching[0]


def read_bytes(path: Path) -> bytes:
    """Read a file, and decompress it if its name ends in .gz.

    Raises:
        ValueError: it is not a complete gzip file.
    """
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete gzip file ({error}); fetch it again."
        ) from error


def read_text(path: Path) -> str:
    """Read UTF-8 text, without a byte order mark.

    Raises:
        ValueError: it is not UTF-8, or not a complete gzip file.
    """
    content = read_bytes(path)
    try:
        # not utf-8-sig, whose errors have offsets after the byte order mark
        return content.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path}, line {line}, is not UTF-8 text (byte {error.start} of the file); "
            f"convert it, for example with iconv -f latin1 -t utf-8."
        ) from error


def read_lines(path: Path) -> list[str]:
    """Read the lines of UTF-8 text, without their ends; see `read_text`."""
    # not splitlines, which also splits at other characters, inside sentences
    lines = read_text(path).split("\n")
    if not lines[-1]:  # after the last newline
        lines.pop()
    return [line.removesuffix("\r") for line in lines]
