"""Noticing that another rank is gone, wherever it ran, and saying which one.

A rank that dies leaves the others waiting: gloo tells them that some connection was closed, NCCL
lets them wait for ten minutes. So every rank says once a second in torch's own store that it is
alive, and looks who else is. When one has been silent for too long, or has said why it ended, the
others end as well, and the first of each machine says which one it was. Nothing is saved on the
way: a checkpoint is whole or absent, and the same command continues from the newest.
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
SILENT_S = 30.0  # a rank that has said nothing for so long is gone
SUSPECT_S = 6.0  # the same, where something else went wrong already
_LEFT, _FAILED, _LOST = "left", "failed ", "lost "


class RankLost(BadInput):
    """Another rank is gone; the run can be continued."""

    @classmethod
    def of(cls, told: str) -> "RankLost":
        return cls(told, fix="the same command continues the run")


class Heartbeat:
    """This rank's beats, and its look at the others'."""

    def __init__(
        self, store: Store, rank: int, size: int, *, end: Callable[[str], None] | None = None
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._end = end or self._end_process
        self._host = socket.gethostname()
        self._beats = 0
        self._seen: dict[int, tuple[str, float]] = {}  # a rank's last words, and when we heard them
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="fledge-heartbeat")
        self._say(str(self._beats))

    def start(self) -> None:
        """Once all ranks have said something."""
        self._thread.start()

    def stop(self, failure: str | None = None) -> None:
        """The last word: this rank ends in order, or this is why it does not."""
        if self._over.is_set():
            return
        self._silence()
        self._say(_LEFT if failure is None else _FAILED + failure)

    def lost(self, *, silent_s: float) -> str | None:
        """Who is gone, in words; None: everybody is there, as far as one can tell."""
        return self._told(self._look(), silent_s)

    def wait_for_lost(self) -> str | None:
        """The same after a failure that another rank's death may have caused: whoever is dead will
        soon have been silent for long."""
        until = time.monotonic() + SUSPECT_S + 2 * BEAT_S
        while (told := self.lost(silent_s=SUSPECT_S)) is None and time.monotonic() < until:
            time.sleep(BEAT_S / 2)
        return told

    def pass_on(self, told: str) -> None:
        """Tell all others, who end at once, and end after them: where torchrun starts a job anew,
        its agents must not take one another's restart for new machines that want to join."""
        self._silence()
        known = any(said.split(" ", 1)[1].startswith(_LOST) for said, _ in self._seen.values())
        if not known:
            with contextlib.suppress(RuntimeError):  # the store may be what is lost
                self._say(_LOST + told)
            time.sleep(3 * BEAT_S)

    def _silence(self) -> None:
        """No more beats, which would stand over the last word."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(BEAT_S):
            try:
                self._beats += 1
                self._say(str(self._beats))
                told = self.lost(silent_s=SILENT_S)
            except RuntimeError:  # the store lives in rank 0, or in the torchrun that started it
                told = "rank 0 or its torchrun is gone: its store does not answer"
            if told is not None and not self._over.is_set():
                self.pass_on(told)
                self._end(told)
                return

    def _say(self, words: str) -> None:
        self._store.set(str(self._rank), f"{self._host} {words}")

    def _look(self) -> list[str]:
        with self._lock:  # the main thread looks, too
            values = self._store.multi_get([str(rank) for rank in range(self._size)])
            now = time.monotonic()
            words = [value.decode(errors="replace") for value in values]
            for rank, said in enumerate(words):
                if self._seen.get(rank, ("", 0.0))[0] != said:
                    self._seen[rank] = said, now
        return words

    def _told(self, words: list[str], silent_s: float) -> str | None:
        now = time.monotonic()
        for rank, said in enumerate(words):
            host, last = said.split(" ", 1)
            silent = now - self._seen[rank][1]
            if rank == self._rank or last == _LEFT:
                continue
            if last.startswith(_LOST):
                return last.removeprefix(_LOST)
            if last.startswith(_FAILED):
                if silent >= min(silent_s, SUSPECT_S):  # it may have failed as we are failing
                    return f"rank {rank} on {host} ended: {last.removeprefix(_FAILED)}"
            elif silent >= silent_s:
                return f"rank {rank} on {host} is gone: nothing heard of it for {silent:.0f} s"
        return None

    def speaks(self) -> bool:
        """Whether this rank is the first living one of its machine: one line is enough."""
        now = time.monotonic()
        lower = [self._seen.get(rank, ("", 0.0)) for rank in range(self._rank)]
        alive = [said for said, heard in lower if now - heard < SUSPECT_S]
        return not any(said.split(" ", 1)[0] == self._host for said in alive)

    def _end_process(self, told: str) -> None:
        """From a thread, while the main one may wait for the dead forever."""
        if self.speaks():
            Terminal(stderr=True, soft_wrap=True).say(f"fledge: {RankLost.of(told)}")
        os._exit(2)


_current: Heartbeat | None = None  # of this process, as its process group is


def start_heartbeat(rank: int, size: int, *, run: str) -> None:
    """Begin to watch; all ranks call it, with the same word for this start of the run."""
    global _current
    _current = Heartbeat(_store_of_ranks(f"fledge/{run}"), rank, size)
    dist.barrier()
    _current.start()


def stop_heartbeat() -> None:
    """This rank ends in order."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


@contextlib.contextmanager
def ending_together(waiting: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Tell the other ranks why this one ends, and turn a failure that another one's death caused
    into a line that names it. `waiting`: what to enter while it is not yet clear who died."""
    try:
        yield
    except BaseException as error:
        told = None
        if _current is not None and isinstance(error, RuntimeError):  # so collectives fail
            with waiting():
                told = _current.wait_for_lost()
        if _current is None or told is None:
            if _current is not None:
                _current.stop(first_line(error))
            raise
        speaks = _current.speaks()
        _current.pass_on(told)
        if not speaks:
            raise SystemExit(2) from None
        raise RankLost.of(told) from None


def _store_of_ranks(prefix: str) -> Store:
    """A connection of its own to the store through which the ranks met: another one may be waiting
    for something."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=20), wait_for_workers=False
    )
    return PrefixStore(prefix, store)
