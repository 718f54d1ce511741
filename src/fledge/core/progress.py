"""How far something is, where nobody watches a bar: in logs and under Slurm.

A line now and then, from a thread of its own, so that a step that takes minutes is not silent.
"""

import contextlib
import threading
import time
from collections.abc import Callable

EVERY_S = 10.0  # at most so often, unless a line is asked for


class PlainProgress:
    """A bar as lines: the same words as `fledge.cli.console.progress_bar` takes."""

    def __init__(self, say: Callable[[str], None], what: str, unit: str = "") -> None:
        self._say, self._description, self._unit, self._note = say, what, unit, ""
        self._total: float | None = None
        self._completed = 0.0
        self._begin = self._said = time.monotonic()
        self._since = self._begin, 0.0  # when counting began, and at how many
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True, name="fledge-progress")

    def __enter__(self) -> "PlainProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def update(
        self,
        *,
        total: float | None = None,
        completed: float | None = None,
        advance: float = 0,
        description: str | None = None,
        unit: str | None = None,
        note: str | None = None,
        now: bool = False,
    ) -> None:
        """`now`: worth a line of its own, however short the last one is ago."""
        with self._lock:
            done = (self._completed if completed is None else completed) + advance
            other = description not in (None, self._description)
            idle = other and done == self._since[1]  # what came before was not what is counted
            if idle or done < self._completed or total not in (None, self._total):
                self._since = time.monotonic(), done
            self._completed = done
            self._total = self._total if total is None else total
            self._description = self._description if description is None else description
            self._unit = self._unit if unit is None else unit
            self._note = self._note if note is None else note
            if now:
                self._tell_once()

    def line(self) -> str:
        """`training 20/420 steps (5%), loss 3.2; 1:02 elapsed, about 20:10 left`."""
        shown = self._description
        if self._total:
            share = self._completed / self._total
            shown += f" {self._completed:,.0f}/{self._total:,.0f} {self._unit}".rstrip()
            shown += f" ({share:.0%})"
        shown += f", {self._note}" if self._note else ""
        elapsed = f"{clock_time(time.monotonic() - self._begin)} elapsed"
        left = self._left()
        return f"{shown}; {elapsed}" + ("" if left is None else f", about {clock_time(left)} left")

    def _left(self) -> float | None:
        since, before = self._since
        done = self._completed - before
        if not self._total or done <= 0 or self._completed >= self._total:
            return None
        return (time.monotonic() - since) / done * (self._total - self._completed)

    def _tell(self) -> None:
        while not self._over.wait(max(0.01, self._said + EVERY_S - time.monotonic())):
            with self._lock, contextlib.suppress(OSError):  # a closed pipe is not this one's affair
                if time.monotonic() >= self._said + EVERY_S:
                    self._tell_once()

    def _tell_once(self) -> None:
        self._said = time.monotonic()
        self._say(self.line())


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
