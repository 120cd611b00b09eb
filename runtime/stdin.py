"""Sentences to translate, or pairs to score, as they come in."""

import os


def lines_at_hand(file: int, most: int):
    """Yield lists of lines: those that can be read without waiting, `most` at a time.

    Raises:
        ValueError: a line is not UTF-8.
    """
    rest, number = b"", 0
    while True:
        chunk = os.read(file, 1 << 16)  # returns as soon as there is anything
        *lines, rest = (rest + chunk).split(b"\n") if chunk else (rest, b"")
        if not chunk and lines == [b""]:
            return
        for start in range(0, len(lines), most):
            decoded = []
            for line in lines[start : start + most]:
                number += 1
                try:
                    decoded.append(line.decode())
                except UnicodeDecodeError:
                    raise ValueError(
                        f"Line {number} of the input is not UTF-8; convert it, as with "
                        f"iconv -f latin1 -t utf-8."
                    ) from None
            yield decoded
        if not chunk:
            return


def pairs_of(lines: list[str], first: int = 0) -> tuple[list[str], list[str]]:
    """The sources and the targets of lines of two columns; `first` lines were before.

    Raises:
        ValueError: a line has not two.
    """
    pairs = [line.split("\t") for line in lines]
    for number, fields in enumerate(pairs, first + 1):
        if len(fields) != 2:
            raise ValueError(
                f"Line {number} of the input has {len(fields)} tab-separated fields "
                f"instead of 2, source and target; mend it, or take it out."
            )
    return [source for source, _ in pairs], [target for _, target in pairs]
