"""Work that any number of processes share, on any machines that see the same directory.

    .claims/.beat.X    a process, which touches its files every few seconds
    .claims/00012.0    made by one process alone, gone when the work is done
    .claims/00012.1    the first was not touched for too long: taken over, by one process alone

Making a file that must not exist yet is atomic on every file system; locks and renames over a
network are not always. So a claim is a file, and to take one over is to make the next file: nobody
can take away what somebody has just taken. A process that only slept may still finish what was
taken from it. Results are written whole and come out the same whoever writes them, so this costs
time and nothing else.

Ages are differences between times of one file system: machines whose clocks differ agree on them.
A process that was killed on this machine is known to be dead at once.
"""

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from fledge.core.files import removed

BEAT_S = 5.0  # how often a claim is touched
STALE_S = 60.0  # not touched for so long: its process is dead
POLL_S = 0.5  # how often a process without work looks at what the others do


class Claims:
    """The claims of this process in a directory of claims; all are given up at the end.

    The directory lies in the place of work. Whoever leaves last removes it, and from that place the
    temporary files of processes that were killed."""

    def __init__(self, directory: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S):
        self._directory, self._beat_s, self._stale_s = directory, beat_s, stale_s
        self._clock = directory / f".beat.{uuid.uuid4().hex}"
        self._held: dict[str, Path] = {}
        self._lock = threading.Lock()  # of what is held: the thread below touches it
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="fledge-claims")

    def __enter__(self) -> "Claims":
        # renamed, for a process that is killed in between would leave a file that is nobody's
        begun = self._directory.parent / f"{self._clock.name}.tmp"
        while not self._clock.exists():
            with contextlib.suppress(FileNotFoundError):  # the last one has just left
                self._directory.mkdir(parents=True, exist_ok=True)
                begun.write_text(_owner())
                begun.replace(self._clock)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)
        _unlink(path for path in list(self._directory.glob("*.*")) if self._is_stale(path))
        left = self._temporary()  # what is there before nobody is at work is nobody's then
        self._clock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not the last one
            self._directory.rmdir()
            _unlink(left)

    def take(self, name: str) -> bool:
        """Claim a piece of work; False: somebody is at it."""
        taken = self._generations(name)
        if taken and not self._is_stale(taken[-1]):
            return False
        number = int(taken[-1].suffix[1:]) + 1 if taken else 0
        path = self._directory / f"{name}.{number}"
        try:
            with path.open("x") as file:
                file.write(_owner())
        except FileExistsError:
            return False
        except FileNotFoundError:
            raise removed(self._directory.parent) from None
        # what we looked at may have been given back since, and taken anew under a lower number
        if not all(self._is_stale(other) for other in self._generations(name) if other != path):
            path.unlink(missing_ok=True)
            return False
        with self._lock:
            self._held[name] = path
        return True

    def release(self, name: str) -> None:
        """Give a piece of work back, finished or not, with what was left by those before."""
        with self._lock:
            path = self._held.pop(name)
        for older in self._generations(name):
            if int(older.suffix[1:]) <= int(path.suffix[1:]):
                older.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """One process after the other."""
        while not self.take(name):
            time.sleep(POLL_S / 10)
        try:
            yield
        finally:
            self.release(name)

    def share(
        self,
        names: Iterable[str],
        is_done: Callable[[str], bool],
        *,
        waiting: Callable[[int], None] = lambda _: None,
    ) -> Iterator[str]:
        """The pieces that fall to this process, one by one, until all are done or in its own hands.

        What is yielded counts as this process's until `is_done` says that it is there. `waiting`
        is called with their number while only pieces of others are left.
        """
        left = dict.fromkeys(names)
        while left:
            yield from self.free(left, is_done)
            if left:
                waiting(len(left))
                time.sleep(POLL_S)

    def free(self, left: dict[str, None], is_done: Callable[[str], bool]) -> Iterator[str]:
        """One look at every piece that is left: what nobody has is claimed and yielded. Of `left`
        the pieces remain that others have; for workers that must not wait while they have work."""
        for name in list(left):
            self._release_done(is_done)
            if is_done(name):
                del left[name]
            elif self.take(name):
                del left[name]
                if is_done(name):  # meanwhile, by whoever had it before
                    self.release(name)
                else:
                    yield name
        self._release_done(is_done)

    def has_company(self) -> bool:
        """Whether another process works here, too."""
        clocks = self._directory.glob(".beat.*")
        return any(path != self._clock and not self._is_stale(path) for path in clocks)

    def remove_temporary_files(self) -> None:
        """Those of processes that were killed, unless others are at work: whoever made one before
        we looked is seen when we look for company."""
        left = self._temporary()
        if not self.has_company():
            _unlink(left)

    def _temporary(self) -> list[Path]:
        return list(self._directory.parent.rglob(".*.tmp"))

    def _release_done(self, is_done: Callable[[str], bool]) -> None:
        for name in [name for name in self._held if is_done(name)]:
            self.release(name)

    def _generations(self, name: str) -> list[Path]:
        """The claims of a piece of work, the one that counts last."""
        found = self._directory.glob(f"{name}.*")
        return sorted((p for p in found if p.suffix[1:].isdigit()), key=lambda p: int(p.suffix[1:]))

    def _is_stale(self, path: Path) -> bool:
        """A claim that is gone was given back: nobody's."""
        try:
            os.utime(self._clock)  # without a time: the file system's own
            age = self._clock.stat().st_mtime - path.stat().st_mtime
            return age > self._stale_s or _is_dead(path.read_text())
        except FileNotFoundError:
            return not path.exists()

    def _beat(self) -> None:
        while not self._over.wait(self._beat_s):
            with self._lock:
                paths = [self._clock, *self._held.values()]
            for path in paths:
                with contextlib.suppress(OSError):  # removed by hand: the work goes on
                    os.utime(path)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _owner() -> str:
    return f"{os.getpid()} {_machine()}"


def _machine() -> str:
    """Where a process number means something: this start of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: nothing is known, time will tell
        return ""


def _is_dead(owner: str) -> bool:
    """Whether a claim's process was one of this machine and is no more."""
    number, _, machine = owner.partition(" ")
    if not machine or machine != _machine():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # somebody else's, and alive
        return False
    return False
