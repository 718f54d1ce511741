"""Measures where the time of a step goes, without synchronizing with the device."""

import contextlib
import time
from collections.abc import Iterator, Sequence

import torch

from fledge.core.transfer import record_event


class Clock:
    """Seconds per named phase since the last reading; on a GPU by CUDA events, read only then."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._gpu is not None:
            begin = record_event(self._gpu, timed=True)
            yield
            self._events.append((name, begin, record_event(self._gpu, timed=True)))
        else:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> tuple[float, dict[str, float]]:
        """(wall seconds, seconds per phase) since the last reading; waits for the device."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        for name, begin, end in self._events:
            self._add(name, begin.elapsed_time(end) / 1000)
        now = time.perf_counter()
        wall, phases = now - self._since, self._seconds
        self._since, self._seconds, self._events = now, {}, []
        return wall, phases


class Clocks(Clock):
    """A clock that records each phase in the clocks of several drafts, which it serves at once."""

    def __init__(self, clocks: Sequence[Clock], device: torch.device) -> None:
        super().__init__(device)
        self._clocks = clocks

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for clock in self._clocks:
                stack.enter_context(clock.phase(name))
            yield
