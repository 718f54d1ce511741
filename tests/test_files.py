"""Files are whole or absent; a full disk is one line and a resumable state."""

import errno

import pytest
import safetensors.torch
import torch
from safetensors import SafetensorError

from fledge.cli import main
from fledge.files import atomic_directory, atomic_file, save_tensors


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


def test_a_full_disk_is_an_oserror_and_one_line(tmp_path, monkeypatch, capsys):
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
    said = capsys.readouterr().err.strip()
    assert said.startswith("fledge: the disk is full")
    assert "\n" not in said
