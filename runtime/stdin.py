"""Read lines of standard input in batches, without waiting for full batches."""

import os
from collections.abc import Iterator


def available_lines(file: int, most: int) -> Iterator[list[str]]:
    """Yield lists of at most `most` lines, as soon as any line is available.

    Line ends may be those of DOS, and the first line may start with a byte order mark.

    Args:
        file: a file descriptor.
        most: maximum number of lines per list.

    Raises:
        ValueError: a line is not UTF-8, or the file is a folder.
    """
    unfinished, number = b"", 0
    while True:
        try:
            chunk = os.read(file, 1 << 16)  # returns as soon as anything is available
        except IsADirectoryError:
            raise ValueError("The input is a folder; name a file: < FILE.") from None
        *lines, unfinished = (
            (unfinished + chunk).split(b"\n") if chunk else (unfinished, b"")
        )
        if not chunk and lines == [b""]:
            return
        for start in range(0, len(lines), most):
            decoded = []
            for line in lines[start : start + most]:
                number += 1
                try:
                    text = line.decode().removesuffix("\r")
                    decoded.append(text.removeprefix("\ufeff") if number == 1 else text)
                except UnicodeDecodeError:
                    raise ValueError(
                        f"Line {number} of the input is not UTF-8; convert it, for "
                        f"example with iconv -f latin1 -t utf-8."
                    ) from None
            yield decoded
        if not chunk:
            return
