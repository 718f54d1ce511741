"""Files are complete or absent; a full disk is a one-line error and a resumable state."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from fledge.cli import main
from fledge.core.errors import LONGEST_LINE, BadInput, first_line
from fledge.core.files import (
    alone_in,
    atomic_directory,
    atomic_file,
    check_place,
    save_tensors,
    write_text,
)


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def half():
        with atomic_file(path) as handle:
            handle.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "directory"
    for text in ("old", "new"):
        with atomic_directory(path) as temporary:
            (temporary / text).write_text(text)

    def half():
        with atomic_directory(path) as temporary:
            (temporary / "half").write_text("x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert [p.name for p in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")  # a rename would replace /dev/null by a file
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


def test_a_link_is_followed_and_not_replaced(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    link.symlink_to(file)
    for text in ("new", "newer"):
        write_text(link, text)
        assert link.is_symlink()
        assert file.read_text() == text
    directory = tmp_path / "directory"
    directory.symlink_to(tmp_path / "elsewhere")
    with atomic_directory(directory) as temporary:
        (temporary / "only").touch()
    assert directory.is_symlink()
    assert [p.name for p in (tmp_path / "elsewhere").iterdir()] == ["only"]


KILLED = """
import os, sys
from pathlib import Path
from fledge.core.files import alone_in, atomic_directory, atomic_file

with atomic_file(Path(sys.argv[1]) / "file"), atomic_directory(Path(sys.argv[1]) / "directory"):
    os.kill(os.getpid(), 9)
"""


def test_leftovers_of_killed_processes_are_removed_and_live_files_stay(tmp_path):
    subprocess.run([sys.executable, "-c", KILLED, tmp_path])
    leftovers = set(tmp_path.iterdir())
    assert len(leftovers) == 2
    (tmp_path / ".directory.x.old").mkdir()  # killed between the two renames
    with atomic_file(tmp_path / "file") as slow:
        assert len(leftovers & set(tmp_path.iterdir())) == 1  # the file's was replaced by ours
        write_text(tmp_path / "file", "quick")
        slow.write(b"slow")
    with atomic_directory(tmp_path / "directory") as slow_directory:
        (slow_directory / "slow").touch()
        with atomic_directory(tmp_path / "directory") as quick:
            (quick / "quick").touch()
    assert (tmp_path / "file").read_text() == "slow"
    assert [p.name for p in (tmp_path / "directory").iterdir()] == ["slow"]
    assert {p.name for p in tmp_path.iterdir()} == {"file", "directory"}


def test_a_directory_that_cannot_be_replaced_is_unchanged(tmp_path, monkeypatch):
    path = tmp_path / "directory"
    path.mkdir()
    (path / "old").touch()
    replace = Path.replace

    def failing(self, target):
        if self.suffix == ".tmp":
            raise OSError(errno.EIO, "Input/output error")
        return replace(self, target)

    def new():
        with atomic_directory(path) as temporary:
            (temporary / "new").touch()

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(OSError, match="Input/output"):
        new()
    assert [p.name for p in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("directory", [False, True])
def test_an_unwritable_path_is_refused_at_once(tmp_path, directory):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    check_place(tmp_path / "new", directory=directory)
    check_place(tmp_path / "far" / "away" / "new", directory=directory)
    check_place(tmp_path if directory else tmp_path / "file", directory=directory)
    wrong = tmp_path / "file" if directory else tmp_path
    for path in (wrong, tmp_path / "file" / "x" / "new", tmp_path / "loop" / "new"):
        with pytest.raises(BadInput, match="name a"):
            check_place(path, directory=directory)
    if directory:
        with pytest.raises(BadInput, match="not a directory"):
            check_place(tmp_path / "loop", directory=True)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "loop"}  # checking created nothing


def test_only_one_command_at_a_time_writes_to_a_directory(tmp_path):
    path = tmp_path / "run"
    with alone_in(path):
        with pytest.raises(BadInput, match="another command is writing"), alone_in(path):
            pass
        (path / "x").touch()
    with alone_in(path):  # free again, and it holds only what was written
        assert [p.name for p in path.iterdir()] == ["x"]
    with pytest.raises(BadInput, match="removed meanwhile"), alone_in(path):
        shutil.rmtree(path)
    with pytest.raises(BadInput, match="removed meanwhile"), alone_in(path):
        path.rename(tmp_path / "aside").with_name("run").mkdir()  # a new one of that name


def test_a_failed_save_is_an_oserror_that_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        save_tensors(tmp_path / "gone" / "x", {"a": torch.zeros(1)})
    assert caught.value.filename == str(tmp_path / "gone" / "x")


def test_a_full_disk_is_an_oserror_and_a_one_line_message(tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space left") as caught:
        save_tensors(tmp_path / "x", {"a": torch.zeros(1)})
    assert caught.value.errno == errno.ENOSPC

    def app(**_):
        raise caught.value

    monkeypatch.setattr(main, "app", app)
    with pytest.raises(SystemExit) as ended:
        main.run([])
    assert ended.value.code == 3
    message = capsys.readouterr().err.strip()
    assert message.startswith("fledge: the disk is full")
    assert "\n" not in message


def test_library_errors_are_cut_to_one_line():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("these are missing:\n  a\n  b")) == "these are missing: a"
    assert first_line(ValueError("")) == "ValueError('')"
    assert first_line(ValueError("x" * LONGEST_LINE)) == "x" * LONGEST_LINE
    assert first_line(ValueError("ab " * 900)) == ("ab " * 900)[:LONGEST_LINE].rstrip() + " ..."


def test_written_files_have_the_permissions_of_the_umask(tmp_path):
    """Temporary files are private; final ones have the mode that open() would give them."""
    (tmp_path / "plain").touch()
    (tmp_path / "made").mkdir()
    with atomic_file(tmp_path / "file") as handle:
        handle.write(b"x")
    with atomic_directory(tmp_path / "directory") as temporary:
        (temporary / "inside").touch(mode=0o600)

    def mode(name):
        return (tmp_path / name).stat().st_mode & 0o777

    assert mode("file") == mode("directory/inside") == mode("plain")
    assert mode("directory") == mode("made")
