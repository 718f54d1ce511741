"""Work that any number of processes share, on any machines that see the same directory.

    .claims/.beat.X    one per process, which touches its files every few seconds
    .claims/00012.0    a claim, created by exactly one process, removed when the work is done
    .claims/00012.1    the first claim went stale and was taken over, again by exactly one process

Exclusive creation of a file is atomic on every file system; locks and renames over a network are
not always. So a claim is a file, and taking one over means creating the next file: a claim that was
just taken cannot be taken away. A process that was merely suspended may still finish work that
another has taken over. Results are written atomically and do not depend on who writes them, so this
costs time and nothing else.

Ages are differences between timestamps of one file system, so machines whose clocks differ agree on
them. A process that was killed on this machine is recognized as dead at once.
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
STALE_S = 60.0  # a claim not touched for this long belongs to a dead process
POLL_S = 0.5  # how often a process without work checks on the others


class Claims:
    """The claims of this process in a directory of claims; all are released on exit.

    The directory is inside the output directory. The last process to leave removes it, and removes
    from the output directory the temporary files of processes that were killed.
    """

    def __init__(self, directory: Path, *, beat_s: float = BEAT_S, stale_s: float = STALE_S):
        self._directory, self._beat_s, self._stale_s = directory, beat_s, stale_s
        self._clock = directory / f".beat.{uuid.uuid4().hex}"
        self._held: dict[str, Path] = {}
        self._lock = threading.Lock()  # guards _held, which the thread below reads
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="fledge-claims")

    def __enter__(self) -> "Claims":
        while not self._clock.exists():
            with contextlib.suppress(FileNotFoundError):  # the last process has just left
                self._directory.mkdir(parents=True, exist_ok=True)
                self._clock.write_text(_owner())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        for name in list(self._held):
            self.release(name)
        _unlink(path for path in list(self._directory.glob("*.*")) if self._is_stale(path))
        # listed before we leave: what comes later is not a leftover
        leftovers = list(self._directory.parent.rglob(".*.tmp"))
        self._clock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another process is still at work
            self._directory.rmdir()
            _unlink(leftovers)

    def take(self, name: str) -> bool:
        """Claim a piece of work. Returns False if another process is working on it."""
        taken = self._claims_of(name)
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
        # the claim seen above may have been released since, and taken again under a lower number
        if not all(self._is_stale(other) for other in self._claims_of(name) if other != path):
            path.unlink(missing_ok=True)
            return False
        with self._lock:
            self._held[name] = path
        return True

    def release(self, name: str) -> None:
        """Release a piece of work, finished or not, and remove the stale claims before ours."""
        with self._lock:
            path = self._held.pop(name)
        for older in self._claims_of(name):
            if int(older.suffix[1:]) <= int(path.suffix[1:]):
                older.unlink(missing_ok=True)

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Run the body in one process at a time."""
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
        """Yield the pieces that this process claims, until all are done or claimed by it.

        A yielded piece stays claimed until `is_done` is true for it. While only pieces of other
        processes are left, `waiting` is called with their number.
        """
        left = dict.fromkeys(names)
        while left:
            yield from self.free(left, is_done)
            if left:
                waiting(len(left))
                time.sleep(POLL_S)

    def free(self, left: dict[str, None], is_done: Callable[[str], bool]) -> Iterator[str]:
        """Claim and yield every unclaimed piece of `left`, in one pass and without waiting.

        Afterwards `left` holds the pieces of other processes. For workers that have other work to
        do meanwhile.
        """
        for name in list(left):
            self._release_done(is_done)
            if is_done(name):
                del left[name]
            elif self.take(name):
                del left[name]
                if is_done(name):  # finished just now by its previous owner
                    self.release(name)
                else:
                    yield name
        self._release_done(is_done)

    def _release_done(self, is_done: Callable[[str], bool]) -> None:
        for name in [name for name in self._held if is_done(name)]:
            self.release(name)

    def _claims_of(self, name: str) -> list[Path]:
        """The claims on a piece of work, oldest first; the last one is the valid one."""
        paths = self._directory.glob(f"{name}.*")
        return sorted((p for p in paths if p.suffix[1:].isdigit()), key=lambda p: int(p.suffix[1:]))

    def _is_stale(self, path: Path) -> bool:
        """Whether a claim's process is dead; a claim that no longer exists counts as stale, too."""
        try:
            os.utime(self._clock)  # sets the file system's current time
            age = self._clock.stat().st_mtime - path.stat().st_mtime
            return age > self._stale_s or _is_dead(path.read_text())
        except FileNotFoundError:
            return not path.exists()

    def _beat(self) -> None:
        while not self._stopped.wait(self._beat_s):
            with self._lock:
                paths = [self._clock, *self._held.values()]
            for path in paths:
                with contextlib.suppress(OSError):  # the user removed it: carry on
                    os.utime(path)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _owner() -> str:
    return f"{os.getpid()} {_machine()}"


def _machine() -> str:
    """Identifies where a process id is valid: this boot of this machine, this container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: rely on the age of the claim
        return ""


def _is_dead(owner: str) -> bool:
    """Whether a claim's process ran on this machine and has ended."""
    number, _, machine = owner.partition(" ")
    if not machine or machine != _machine():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # alive, and another user's
        return False
    return False
