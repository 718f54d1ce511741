"""Replies through shared memory, for a trainer and a target server on one machine.

The client owns the memory: a file under /dev/shm that it names in its request. The server writes
its reply there and answers with a few bytes; the client's tensors are views of the file, and when
the last of them is gone the file is used again. The holder of a segment holds a lock on it, which
the kernel drops with the process: files without a holder are leftovers of a kill, and the next
client or any running server removes them. All segments of a machine together take at most half of
/dev/shm; an answer for which there is no room travels as a body.

A segment whose request failed is never used again: the server that got it may still be writing.
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
from contextlib import suppress
from pathlib import Path

from fledge.target.remote.wire import Message

DIRECTORY = Path("/dev/shm")
_NAME = re.compile(r"fledge-[0-9a-f]{32}")
_GRAIN = 1 << 20


def available() -> bool:
    return DIRECTORY.is_dir() and os.access(DIRECTORY, os.W_OK)


def most_bytes() -> int:
    """What the segments of all clients on this machine may take together."""
    room = os.statvfs(DIRECTORY)
    return room.f_blocks * room.f_frsize // 2


def living_bytes() -> int:
    """What the segments that are there may come to hold, in use or not."""
    total = 0
    for path in _living():
        with suppress(OSError):  # just removed
            total += path.lstat().st_size
    return total


def _living() -> list[Path]:
    if not available():
        return []
    return [path for path in DIRECTORY.glob("fledge-*") if _NAME.fullmatch(path.name)]


def remove_leftovers() -> int:
    """Unlink segments that no process holds; how many there were."""
    removed = 0
    for path in _living():
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # gone, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed += 1
        except OSError:  # held, or just removed by somebody else
            pass
        finally:
            os.close(descriptor)
    return removed


class Segment:
    """One file, held by this process."""

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
            self.size = -(-nbytes // _GRAIN) * _GRAIN
            os.ftruncate(self._descriptor, self.size)

    def map(self, nbytes: int) -> mmap.mmap:
        return mmap.mmap(self._descriptor, nbytes)

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Segments:
    """The segments of one client, each in use by at most one request or batch. No locks: memory is
    given back by the garbage collector, which may run anywhere, in the middle of `lease` too."""

    def __init__(self, *, max_bytes: int | None = None) -> None:
        remove_leftovers()
        self._most_bytes = most_bytes() if max_bytes is None else max_bytes
        self._free: deque[Segment] = deque()
        self._closed = False
        weakref.finalize(self, _discard_all, self._free)  # also when the program ends

    def lease(self, nbytes: int) -> Segment | None:
        """A segment of at least so many bytes; ends in `adopt` or in its own `discard`. None: the
        machine's segments take all the room that they may."""
        try:
            segment = self._free.pop()
        except IndexError:
            segment = None
        size = 0 if segment is None else segment.size
        if nbytes > size and living_bytes() + nbytes - size > self._most_bytes:
            if segment is not None:
                segment.discard()  # small ones that lie idle may be what is in the way
            return None
        segment = segment or Segment()
        segment.grow(nbytes)
        return segment

    def adopt(self, segment: Segment, nbytes: int) -> memoryview:
        """The segment's memory. When nothing looks at it any more, the segment is free again."""
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
    """Write a reply into a client's segment; False when it has to travel as a body instead. The
    name comes from the network: only an existing segment of this very user is written to."""
    if _NAME.fullmatch(name) is None:
        return False
    try:
        descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another machine, another container, another user
        return False
    try:
        facts = os.fstat(descriptor)
        regular = stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid()
        if not regular or facts.st_size < message.nbytes:
            return False
        at = 0
        for chunk in message.chunks():
            while len(chunk):
                done = os.pwrite(descriptor, chunk, at)
                chunk, at = chunk[done:], at + done
        return True
    except OSError as error:
        if error.errno != errno.ENOSPC:  # a small /dev/shm, as containers have
            raise
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, facts.st_size)
        return False
    finally:
        os.close(descriptor)
