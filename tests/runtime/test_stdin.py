"""Lines of standard input, as soon as they are there."""

import os

import pytest

from headcount.runtime.stdin import available_lines


def lines_of(content: bytes, most: int) -> list[list[str]]:
    read, write = os.pipe()
    os.write(write, content)
    os.close(write)
    try:
        return list(available_lines(read, most))
    finally:
        os.close(read)


def test_lines_come_in_batches_with_blank_ones_and_the_last_without_its_end():
    assert lines_of(b"a\n\nb\nc", 2) == [["a", ""], ["b"], ["c"]]
    assert lines_of(b"", 2) == []


def test_ends_of_lines_of_dos_and_a_byte_order_mark_are_no_text():
    content = "\ufeffTo be\r\n\ufeffor\r not\r\n".encode()
    assert lines_of(content, 8) == [["To be", "\ufeffor\r not"]]


def test_a_line_that_is_not_utf8_is_named():
    with pytest.raises(ValueError, match="Line 2 of the input is not UTF-8"):
        lines_of(b"a\n\xff\n", 8)


def test_a_folder_is_named():
    folder = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(ValueError, match="The input is a folder"):
            list(available_lines(folder, 8))
    finally:
        os.close(folder)
