"""Detecting that another rank has died, on whichever machine, and reporting which one.

A rank that dies leaves the others waiting: gloo reports that some connection was closed, NCCL waits
for ten minutes. So every rank writes a heartbeat to torch's own store once a second and reads those
of the others. When a rank has been silent for too long, or has published why it failed, the others
exit as well, and the first rank of each machine reports which one it was. Nothing is saved at that
point: a checkpoint is either complete or absent, and the same command resumes from the newest.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]  # public, and not in its stubs
    PrefixStore,
    Store,
    TCPStore,
)

from fledge.core.errors import BadInput, first_line
from fledge.core.terminal import Terminal

BEAT_S = 1.0
SILENT_S = 30.0  # a rank that has been silent for this long is considered dead
SUSPECT_S = 6.0  # the same once this rank or another has failed
_LEFT, _FAILED, _LOST = "left", "failed ", "lost "
_STORE_GONE = "rank 0 or its torchrun is gone: its store does not answer"


class RankLost(BadInput):
    """Another rank has died; the run can be resumed."""

    @classmethod
    def of(cls, message: str) -> "RankLost":
        return cls(message, fix="the same command continues the run")


class Heartbeat:
    """Publishes this rank's heartbeat and monitors those of the others."""

    def __init__(
        self, store: Store, rank: int, size: int, *, end: Callable[[str], None] | None = None
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._end = end or self._end_process
        self._host = socket.gethostname()
        self._beats, self._store_gone = 0, False
        self._seen: dict[int, tuple[str, float]] = {}  # by rank: status, time it was first read
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="fledge-heartbeat")
        self._publish(str(self._beats))

    def start(self) -> None:
        """Start monitoring; call it once every rank has published a status."""
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """Publish this rank's final status: it ended normally, or failed for this reason."""
        if self._stopped.is_set():
            return
        self._stop_beating()
        self._publish(_LEFT if failure is None else _FAILED + failure)

    def lost(self, *, silent_s: float) -> str | None:
        """A message that names the dead rank, or None if all ranks seem to be alive."""
        try:
            statuses = self._read_statuses()
        except RuntimeError:  # the store lives in rank 0, or in the torchrun that started it
            self._store_gone = True
            return _STORE_GONE
        return self._describe_lost(statuses, silent_s)

    def wait_for_lost(self) -> str | None:
        """`lost` after a failure that another rank's death may have caused: waits until a dead rank
        has been silent for long enough to be recognized."""
        until = time.monotonic() + SUSPECT_S + 2 * BEAT_S
        while (message := self.lost(silent_s=SUSPECT_S)) is None and time.monotonic() < until:
            time.sleep(BEAT_S / 2)
        return message

    def pass_on(self, message: str) -> None:
        """Pass the message to all other ranks, which exit at once, and return after they have: when
        torchrun restarts a job, its agents must not mistake one another's restart for new machines
        that want to join."""
        self._stop_beating()
        published = any(text.split(" ", 1)[1].startswith(_LOST) for text, _ in self._seen.values())
        if not published:
            self._publish(_LOST + message)
            time.sleep(3 * BEAT_S)

    def _stop_beating(self) -> None:
        """Stop the heartbeat, which would overwrite the final status."""
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._beats += 1
            self._publish(str(self._beats))
            message = self.lost(silent_s=SILENT_S)
            if message is not None and not self._stopped.is_set():
                self.pass_on(message)
                self._end(message)
                return

    def _publish(self, status: str) -> None:
        with contextlib.suppress(RuntimeError):  # `lost` notices when the store is gone
            self._store.set(str(self._rank), f"{self._host} {status}")

    def _read_statuses(self) -> list[str]:
        with self._lock:  # the main thread reads them, too
            values = self._store.multi_get([str(rank) for rank in range(self._size)])
            now = time.monotonic()
            statuses = [value.decode(errors="replace") for value in values]
            for rank, status in enumerate(statuses):
                if self._seen.get(rank, ("", 0.0))[0] != status:
                    self._seen[rank] = status, now
        return statuses

    def _describe_lost(self, statuses: list[str], silent_s: float) -> str | None:
        now = time.monotonic()
        for rank, status in enumerate(statuses):
            host, last = status.split(" ", 1)
            silent = now - self._seen[rank][1]
            if rank == self._rank or last == _LEFT:
                continue
            if last.startswith(_LOST):
                return last.removeprefix(_LOST)
            if last.startswith(_FAILED):
                if silent >= min(silent_s, SUSPECT_S):  # it may be a victim of the same death
                    return f"rank {rank} on {host} ended: {last.removeprefix(_FAILED)}"
            elif silent >= silent_s:
                return f"rank {rank} on {host} is gone: nothing heard of it for {silent:.0f} s"
        return None

    def speaks(self) -> bool:
        """Whether this is the lowest live rank of its machine, which alone prints the message."""
        now = time.monotonic()
        first = 1 if self._store_gone and not _store_of_torchrun() else 0  # rank 0 died with it
        lower = [self._seen.get(rank, ("", 0.0)) for rank in range(first, self._rank)]
        alive = [status for status, read_at in lower if now - read_at < SUSPECT_S]
        return not any(status.split(" ", 1)[0] == self._host for status in alive)

    def _end_process(self, message: str) -> None:
        """Exit from this thread: the main thread may be waiting for the dead rank forever."""
        if self.speaks():
            Terminal(stderr=True, soft_wrap=True).say(f"fledge: {RankLost.of(message)}")
        os._exit(2)


_current: Heartbeat | None = None  # one per process, like the process group


def start_heartbeat(rank: int, size: int, *, run: str) -> None:
    """Start the heartbeat; all ranks call it with the same unique `run` id for this launch."""
    global _current
    _current = Heartbeat(_store_of_ranks(f"fledge/{run}"), rank, size)
    dist.barrier()
    _current.start()


def stop_heartbeat() -> None:
    """Stop the heartbeat of a rank that ends normally."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


@contextlib.contextmanager
def ending_together(waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Report this rank's failure to the others, and turn a failure that another rank's death caused
    into an error that names that rank. `waiting` is entered while the dead rank is identified."""
    try:
        yield
    except BaseException as error:
        message = None
        if _current is not None and isinstance(error, RuntimeError):  # raised by collectives
            with waiting():
                message = _current.wait_for_lost()
        if _current is None or message is None:
            if _current is not None:
                interrupted = isinstance(error, KeyboardInterrupt)
                _current.stop("interrupted" if interrupted else first_line(error))
            raise
        speaks = _current.speaks()
        _current.pass_on(message)
        if not speaks:
            raise SystemExit(2) from None
        raise RankLost.of(message) from None


def _store_of_torchrun() -> bool:
    """Whether torchrun holds the store that all ranks use; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_of_ranks(prefix: str) -> Store:
    """A separate connection to the store that the process group uses: the shared one may be blocked
    in a wait."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    return PrefixStore(prefix, store)
