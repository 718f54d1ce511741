"""Files that are either whole or absent: write to a temporary name, fsync, rename.

Every file and directory fledge leaves behind goes through here.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from fledge.core.errors import BadInput

# Read once, on import: reading the umask means setting it, which affects all threads.
_UMASK = os.umask(0o077)
os.umask(_UMASK)


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_place(path: Path, *, directory: bool = False, read: Iterable[str | Path] = ()) -> None:
    """Refuse an output path that cannot be written, before hours of work go into it.

    `read` are the command's inputs, which its output must not overwrite.
    """
    if path.exists() and any(os.path.exists(source) and path.samefile(source) for source in read):
        raise BadInput("is read by this command", where=str(path), fix="name another output")
    if directory and os.path.lexists(path) and not path.is_dir():
        raise BadInput("not a directory", where=str(path), fix="name another one")
    if not directory and path.is_dir():
        raise BadInput("is a directory", where=str(path), fix="name a file")
    folder = path if path.is_dir() else path.absolute().parent
    while not os.path.lexists(folder):  # missing ones will be created
        folder = folder.parent
    if not folder.is_dir():
        raise BadInput(f"'{folder}' is not a directory", where=str(path), fix="name another place")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"'{folder}' may not be written", where=str(path), fix="name another place")


def removed(directory: Path) -> BadInput:
    """The error for a directory that was removed while a command wrote to it."""
    fix = "remove what is left of it and run it again"
    return BadInput("was removed meanwhile", where=str(directory), fix=fix)


@contextlib.contextmanager
def alone_in(directory: Path) -> Iterator[None]:
    """Lock a directory for one writer at a time, and check at the end that it was not replaced.

    The lock ends with its process and leaves nothing behind.
    """
    directory.mkdir(parents=True, exist_ok=True)
    fd = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                "another command is writing here",
                where=str(directory),
                fix="wait for it, or name another place",
            ) from None
        except OSError:
            pass  # some file systems do not support locks
        yield
        if not (directory.exists() and os.path.samestat(os.fstat(fd), directory.stat())):
            raise removed(directory)
    finally:
        os.close(fd)


def _remove_abandoned(path: Path, suffix: str) -> None:
    """Remove leftovers of killed writers of `path`; a running writer holds a lock on its own."""
    for entry in os.scandir(path.parent):
        if not (entry.name.startswith(f".{path.name}.") and entry.name.endswith(suffix)):
            continue
        with contextlib.suppress(OSError):  # locked, or already gone
            fd = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            finally:
                os.close(fd)


@contextlib.contextmanager
def temporary_sibling(path: Path, *, directory: bool) -> Iterator[Path]:
    """A new empty file or directory beside `path`, locked while its writer is running."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path, ".tmp")
    prefix, suffix = f".{path.name}.", ".tmp"
    if directory:
        temporary = Path(tempfile.mkdtemp(suffix, prefix, path.parent))
    else:
        descriptor, name = tempfile.mkstemp(suffix, prefix, path.parent)
        os.close(descriptor)
        temporary = Path(name)
    fd = os.open(temporary, os.O_RDONLY)
    with contextlib.suppress(OSError):  # no locks on this file system: nothing is removed there
        fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        yield temporary
    finally:
        if directory:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        os.close(fd)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary sibling for writing; on success it replaces `path`, on failure it is
    removed.

    A device or a pipe (/dev/stdout, /dev/null) is written directly: renaming would replace it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with path.open("wb") as handle:
            yield handle
        return
    path = Path(os.path.realpath(path))  # write to a link's target, keep the link
    with temporary_sibling(path, directory=False) as temporary:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(0o666 & ~_UMASK)  # as a plain open(); mkstemp creates it with 0600
        temporary.replace(path)
        fsync_path(path.parent)


def write_text(path: Path, text: str) -> None:
    with atomic_file(path) as handle:
        handle.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write JSON, sorted and indented, so that equal values give equal files."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


@contextlib.contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a temporary sibling directory; on success it becomes `path` (an old one is replaced)."""
    path = Path(os.path.realpath(path))
    with temporary_sibling(path, directory=True) as temporary:
        yield temporary
        for entry in temporary.rglob("*"):
            entry.chmod((0o777 if entry.is_dir() else 0o666) & ~_UMASK)  # some libraries write 0600
            fsync_path(entry)
        temporary.chmod(0o777 & ~_UMASK)
        fsync_path(temporary)
        _rename_over(temporary, path)
        fsync_path(path.parent)
        _remove_abandoned(path, ".old")


def _rename_over(temporary: Path, path: Path) -> None:
    """Replace a directory: it cannot be renamed over a non-empty one, so that is moved aside."""
    if not path.exists():
        temporary.replace(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".old"))
    try:
        path.replace(old)
    except OSError:
        old.rmdir()
        raise
    try:
        temporary.replace(path)
    except OSError:
        old.replace(path)
        raise


def save_tensors(path: Path, tensors: Any, metadata: dict[str, str] | None = None) -> None:
    """Write torch tensors to a safetensors file; disk errors are OSErrors as elsewhere."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path, metadata=metadata)
    except SafetensorError as error:
        if (match := re.search(r"os error (\d+)", str(error))) is None:
            raise
        number = int(match[1])
        raise OSError(number, os.strerror(number), str(path)) from None


def cache_dir() -> Path:
    """Directory for files that can be recreated: $FLEDGE_CACHE, else the user's cache directory."""
    if root := os.environ.get("FLEDGE_CACHE"):
        return Path(root).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fledge"
