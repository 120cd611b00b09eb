"""Local files: their lines, and errors that name the file and the place."""

import gzip

import pytest

from headcount.data.cache import prepared_in
from headcount.data.files import folder_of, read_lines, read_text


@pytest.mark.parametrize(
    "text, lines",
    [
        ("", []),
        ("\n", [""]),
        ("one\n\ntwo", ["one", "", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        ("a line\u2028and\x85a line\n", ["a line\u2028and\x85a line"]),
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_only_at_newlines(tmp_path, text, lines, mark):
    content = (mark + text).encode()
    for name, written in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(written)
        assert read_text(tmp_path / name) == text
        assert read_lines(tmp_path / name) == lines


def test_a_folder_of_an_unknown_user_does_not_exist(monkeypatch):
    with pytest.raises(FileNotFoundError, match="no folder ~nobody1/x"):
        folder_of("text", "~nobody1/x")
    monkeypatch.setenv("TFDS_DATA_DIR", "~nobody1/x")
    with pytest.raises(FileNotFoundError, match="~nobody1/x, .* TFDS_DATA_DIR"):
        prepared_in()


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_file_that_is_not_utf8_raises_with_line_and_byte(tmp_path, mark):
    content = mark + b"a\nb\xff\n"
    (tmp_path / "a.txt").write_bytes(content)
    culprit = f"a.txt, line 2, .*byte {content.index(0xFF)} .*iconv"
    with pytest.raises(ValueError, match=culprit):
        read_lines(tmp_path / "a.txt")


def test_an_incomplete_gzip_file_raises_with_its_name(tmp_path):
    whole = gzip.compress(b"a b c\n" * 99)
    for content in (b"not gzip", whole[:5], whole[:-9], whole[:15] + whole[16:]):
        (tmp_path / "a.txt.gz").write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.txt\.gz"):
            read_text(tmp_path / "a.txt.gz")


def test_a_folder_that_is_needed_or_missing_is_named_with_its_key(tmp_path):
    assert folder_of("text", str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="data.name=text .*data.directory"):
        folder_of("text", None)
    with pytest.raises(FileNotFoundError, match=r"nowhere \(data.directory\)"):
        folder_of("text", str(tmp_path / "nowhere"))
