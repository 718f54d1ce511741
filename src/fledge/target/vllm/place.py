"""A directory for short-lived files of states: in shared memory if that is large enough.

The process that creates one holds a lock in it, which the kernel releases when the process ends.
Directories whose lock is free were left by killed processes, and are removed when the next one is
created.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_ROOMY_BYTES = 4 << 30  # containers have 64 MB there, less than one batch
_PREFIX, _LOCK_NAME = "fledge-vllm-", ".held"


class StatesPlace:
    """A directory that is created on first use, below `parent` or a default location."""

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent or (_SHARED_MEMORY if _is_roomy(_SHARED_MEMORY) else None)
        self._directory: Path | None = None
        self._lock = -1

    def make(self) -> Path:
        if self._directory is None:
            parent = self._parent or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(parent)
            directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            new = directory / ".new"  # renamed once it is locked, lest it look like a leftover
            self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(directory / _LOCK_NAME)
            self._directory = directory
        return self._directory

    def remove(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
        self._directory = None


def remove_leftovers(parent: Path) -> None:
    """Remove directories whose owner is gone. One that is just being created has no lock file yet,
    and is kept."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK_NAME}"):
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
    stats = os.statvfs(directory)
    return stats.f_bavail * stats.f_frsize >= _ROOMY_BYTES
