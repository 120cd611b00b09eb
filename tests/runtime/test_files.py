"""Writing files: atomically, without following links, cleaning up after kills."""

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headcount.runtime.files import (
    check_output,
    locked,
    new_folder,
    open_append,
    remove_parts,
    write,
)

HALF = """
import os, sys
from pathlib import Path
from headcount.runtime import files

part, number = files._create_part(Path(sys.argv[1]))
os.write(number, b"half")
print("written", flush=True)
sys.stdin.read()
"""


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    write(link, "new")
    assert victim.read_text() == "precious"
    assert link.read_text() == "new" and not link.is_symlink()


def lock(path):
    with locked(path):
        pass


@pytest.mark.parametrize("opened", [lock, open_append])
def test_a_link_is_not_opened(tmp_path, opened):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("precious")
    link.symlink_to(victim)
    with pytest.raises(ValueError, match=f"{link} must not be a link"):
        opened(link)
    link.unlink()
    link.symlink_to(tmp_path / "new")
    with pytest.raises(ValueError, match="must not be a link"):
        opened(link)
    assert victim.read_text() == "precious" and not (tmp_path / "new").exists()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write(path, "\ud800")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write(tmp_path / "folder", "new")
    assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "file", "content")
    monkeypatch.undo()
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_leaves_is_removed_but_not_what_is_being_written(tmp_path):
    path = tmp_path / "file"
    process = subprocess.Popen(
        [sys.executable, "-c", HALF, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "written\n"
    (part,) = tmp_path.iterdir()
    remove_parts(tmp_path)
    assert part.exists(), "its writer lives"
    process.kill()
    process.communicate()
    remove_parts(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_named_and_nothing_is_left(tmp_path):
    (tmp_path / "link").symlink_to("x")
    for path, why in (
        (tmp_path, "must be a file in an existing folder"),
        (tmp_path / "no/x", "must be a file in an existing folder"),
        (tmp_path / "link", "must be a regular file"),
        (Path("/proc/x.txt"), "can't be written"),  # though root may write anywhere
    ):
        with pytest.raises(ValueError, match=f"--output=F.*{why}"):
            check_output("--output=F", path)
    check_output("--output=F", tmp_path / "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "link"]


def test_a_new_folder_is_there_at_once_or_not_at_all(tmp_path):
    folder = tmp_path / "a" / "b"
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as part:
        (part / "x").write_text("half")
        raise KeyboardInterrupt
    assert list(folder.parent.iterdir()) == []
    folder.mkdir()  # an empty one may be there
    with new_folder(folder) as part:
        (part / "x").write_text("whole")
        assert list(folder.iterdir()) == []
    assert list(folder.parent.iterdir()) == [folder]
    for path in (folder, folder / "x"):
        with pytest.raises(ValueError, match=f"{path} is not empty"), new_folder(path):
            pass
    assert (folder / "x").read_text() == "whole"


@pytest.mark.parametrize("path", [".", "a/.."])
def test_a_new_folder_is_not_the_current_one(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    match = "name of a new folder"
    with pytest.raises(ValueError, match=match), new_folder(Path(path)):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_one_at_a_time_although_each_removes_the_lock_file(tmp_path, wait):
    """Of two that hold files of one name, only the one that has the name goes on."""
    lock, counter = tmp_path / ".lock", tmp_path / "counter"
    counter.write_text("0")

    def count():
        done = 0
        while done < 100:
            with locked(lock, wait=wait) as held:
                if held:
                    counter.write_text(str(int(counter.read_text()) + 1))
                    lock.unlink()
                    done += 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.read_text() == "400"


def test_files_have_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640
