"""Files that are either whole or absent: write to a temporary name, fsync, rename.

Every file and directory fledge leaves behind goes through here.
"""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mode(wanted: int) -> int:
    """The permissions that a plain open() or mkdir() would have given."""
    umask = os.umask(0)
    os.umask(umask)
    return wanted & ~umask


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary sibling for writing; on success it replaces `path`, on failure it goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(_mode(0o666))  # mkstemp makes 0600
        temporary.replace(path)
        fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as handle:
        handle.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Sorted and indented, so that two equal values give two equal files."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a temporary sibling directory; on success it becomes `path` (an old one is replaced)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
    try:
        yield temporary
        for entry in temporary.rglob("*"):
            entry.chmod(_mode(0o777 if entry.is_dir() else 0o666))  # some libraries write 0600
            fsync_path(entry)
        temporary.chmod(_mode(0o777))
        fsync_path(temporary)
        if path.exists():  # a directory cannot be renamed over a full one: move the old one aside
            old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
            path.replace(old)
            temporary.replace(path)
            shutil.rmtree(old)
        else:
            temporary.replace(path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def save_tensors(path: Path, tensors: Any, metadata: dict[str, str] | None = None) -> None:
    """A safetensors file of torch tensors; a full disk is an OSError here as everywhere else."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        if "os error 28" in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from None
        raise


def cache_dir() -> Path:
    """Where fledge keeps what it can make again: $FLEDGE_CACHE, else the user's cache directory."""
    if root := os.environ.get("FLEDGE_CACHE"):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fledge"
