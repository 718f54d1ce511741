"""Replies through shared memory, for a trainer and a target server on one machine.

The client owns the memory: a file under /dev/shm that it names in its request. The server writes
its reply there and answers with a few bytes. The client's tensors are views of the file, which is
reused once the last of them is gone. The owner of a segment holds a lock on it, which the kernel
releases when the process ends: unlocked files were left behind by killed processes, and the next
client or any running server removes them. All segments of a machine together take at most half of
/dev/shm; an answer for which there is no room is sent in the body.

A segment whose request failed is never reused: its server may still be writing to it.
"""

import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import weakref
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path

from fledge.target.remote.wire import Message

DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"fledge-[0-9a-f]{32}")
_GRANULARITY = 1 << 20
_OPEN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC


def available() -> bool:
    return DIRECTORY.is_dir() and os.access(DIRECTORY, os.W_OK)


def most_bytes() -> int:
    """The most bytes that the segments of all clients on this machine may take together."""
    room = os.statvfs(DIRECTORY)
    return room.f_blocks * room.f_frsize // 2


def living_bytes() -> int:
    """The total size of all existing segments, in use or not."""
    total = 0
    for path in _segment_paths():
        with suppress(OSError):  # just removed
            total += path.lstat().st_size
    return total


def _segment_paths() -> list[Path]:
    return [path for path in DIRECTORY.glob("fledge-*") if _NAME.fullmatch(path.name)]


def remove_leftovers() -> int:
    """Unlink segments that no process owns, and return how many there were."""
    removed = 0
    for path in _segment_paths():
        with suppress(OSError), ExitStack() as undo:  # gone, another user's, or locked by its owner
            descriptor = os.open(path, _OPEN)
            undo.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
    return removed


class Segment:
    """One file, owned and locked by this process."""

    def __init__(self) -> None:
        while True:
            self.path = DIRECTORY / f"fledge-{secrets.token_hex(16)}"
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:  # not removed as a leftover before the lock
                break
            os.close(self._descriptor)
        self.size = 0

    @property
    def name(self) -> str:
        return self.path.name

    def grow(self, nbytes: int) -> None:
        if nbytes > self.size:
            self.size = -(-nbytes // _GRANULARITY) * _GRANULARITY
            os.ftruncate(self._descriptor, self.size)

    def map(self, nbytes: int) -> mmap.mmap:
        return mmap.mmap(self._descriptor, nbytes)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Segments:
    """The segments of one client, each used by at most one request or batch. Uses no locks: memory
    is returned by the garbage collector, which may run at any point, even within `lease`."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        remove_leftovers()
        self._most_bytes = most_bytes() if max_bytes is None else max_bytes
        self._free: deque[Segment] = deque()
        self._closed = False
        weakref.finalize(self, _discard_all, self._free)  # also at exit

    def lease(self, nbytes: int) -> Segment | None:
        """A segment of at least `nbytes`, to be passed to `adopt` or discarded by the caller. None
        if the machine's segments would exceed their limit."""
        segment = None
        with suppress(IndexError):
            segment = self._free.pop()
        size = 0 if segment is None else segment.size
        if nbytes > size and living_bytes() + nbytes - size > self._most_bytes:
            if segment is not None:
                segment.discard()  # small idle segments may be what takes up the room
            return None
        segment = segment or Segment()
        segment.grow(nbytes)
        return segment

    def adopt(self, segment: Segment, nbytes: int) -> memoryview:
        """The segment's memory. Once nothing refers to it any more, the segment is free again."""
        mapped = segment.map(nbytes)
        weakref.finalize(mapped, self._release, segment)
        return memoryview(mapped)

    def _release(self, segment: Segment) -> None:
        self._free.append(segment)
        if self._closed:
            _discard_all(self._free)

    def close(self) -> None:
        """Remove the free segments now, and the others as soon as their batches are gone."""
        self._closed = True
        _discard_all(self._free)


def _discard_all(segments: deque[Segment]) -> None:
    with suppress(IndexError):
        while True:
            segments.pop().discard()


def write_segment(name: str, message: Message) -> bool:
    """Write a reply to a client's segment; False if it must be sent in the body instead. The name
    comes from the network: only existing segments of the current user are written to."""
    if _NAME.fullmatch(name) is None:
        return False
    try:
        descriptor = os.open(DIRECTORY / name, _OPEN)
    except OSError:  # another machine, another container, another user
        return False
    with open(descriptor, "r+b", buffering=0) as file:
        status = os.fstat(descriptor)
        is_own_file = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own_file or status.st_size < message.nbytes:
            return False
        try:
            for chunk in message.chunks():
                while len(chunk):
                    chunk = chunk[file.write(chunk) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:  # a small /dev/shm, as containers have
                raise
            with suppress(OSError):
                file.truncate(0)
                file.truncate(status.st_size)
            return False
    return True
