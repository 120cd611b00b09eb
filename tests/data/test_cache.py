"""The folder that data are prepared in: downloads, and who may prepare."""

import http.client
import io
import threading
import urllib.request

import pytest

from headcount.data.cache import download, exclusively, write


def test_one_at_a_time_although_each_removes_the_lock_file(tmp_path):
    """Of two that hold files of one name, only the one that has the name goes on."""
    lock, counter = tmp_path / ".lock", tmp_path / "counter"
    counter.write_text("0")

    def count():
        for _ in range(100):
            with exclusively(lock):
                counter.write_text(str(int(counter.read_text()) + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "400"
    assert not lock.exists()


def test_a_lock_is_removed_if_preparing_fails_and_no_link_is_followed(tmp_path):
    lock, victim = tmp_path / "data" / ".lock", tmp_path / "victim"
    with pytest.raises(KeyboardInterrupt), exclusively(lock):
        raise KeyboardInterrupt
    assert list(lock.parent.iterdir()) == []
    victim.write_text("precious")
    lock.symlink_to(victim)
    with pytest.raises(OSError, match="TFDS_DATA_DIR"), exclusively(lock):
        pass
    assert victim.read_text() == "precious"


class Broken(io.BytesIO):
    def read(self):
        raise http.client.IncompleteRead(b"a")


def test_a_download_that_breaks_off_names_the_address_and_leaves_nothing(
    tmp_path, monkeypatch
):
    path = tmp_path / "file"
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Broken())
    with pytest.raises(FileNotFoundError, match="http://x/.*; download it elsewhere"):
        download("http://x/", path, "download it elsewhere")
    assert list(tmp_path.iterdir()) == []
    write(path, b"kept")
    assert download("http://x/", path, "") == b"kept"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write(path, b"old")
    with pytest.raises(TypeError):
        write(path, None)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
