"""A directory for files of states that live for a moment: in memory where it holds a batch.

Whoever has made one holds a lock in it, which the kernel drops with the process; directories
without a holder were left by a kill, and the next one to need a place removes them.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_ROOMY_BYTES = 4 << 30  # containers have 64 MB there, less than one batch
_PREFIX, _HELD = "fledge-vllm-", ".held"


class StatesPlace:
    """Made when it is first asked for, below a directory of the user's choice or of ours."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or (_SHARED_MEMORY if _is_roomy(_SHARED_MEMORY) else None)
        self._made: Path | None = None
        self._lock = -1

    def make(self) -> Path:
        if self._made is None:
            parent = self._parent or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = made / ".new"  # named when it is locked: nobody may take it for a leftover
            self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(made / _HELD)
            self._made = made
        return self._made

    def remove(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            os.close(self._lock)
        self._made = None


def remove_leftovers(parent: Path) -> None:
    """Places whose holder is gone. One that is just being made has no lock yet, and stays."""
    for lock in parent.glob(f"{_PREFIX}*/{_HELD}"):
        with suppress(OSError):  # gone, held, or another user's
            descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
            finally:
                os.close(descriptor)


def _is_roomy(directory: Path) -> bool:
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        return False
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize >= _ROOMY_BYTES
