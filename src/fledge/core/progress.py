"""Progress where there is no terminal for a bar: in logs and under Slurm.

Prints a line at intervals, from a separate thread, so that a step of several minutes is not silent.
"""

import contextlib
import threading
import time
from collections.abc import Callable

Watch = Callable[[str, float, int], None]  # current activity, done, total


def unwatched(what: str, done: float, total: int) -> None:
    """A `Watch` that shows nothing."""


EVERY_S = 10.0  # between two lines, unless one is requested


class PlainProgress:
    """A progress bar as lines of text; same arguments as `fledge.cli.console.progress_bar`."""

    def __init__(self, say: Callable[[str], None], what: str, unit: str = "") -> None:
        self._say, self._description, self._unit, self._note = say, what, unit, ""
        self._total: float | None = None
        self._completed = 0.0
        self._begin = self._printed_at = time.monotonic()
        self._counting_from = self._begin, 0.0  # when counting began, and at which count
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fledge-progress")

    def __enter__(self) -> "PlainProgress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
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
        """Change what is shown. `now` prints a line at once, however recent the last one is."""
        with self._lock:
            done = (self._completed if completed is None else completed) + advance
            renamed = description not in (None, self._description)
            restart = renamed and done == self._counting_from[1]  # nothing was counted before
            if restart or done < self._completed or total not in (None, self._total):
                self._counting_from = time.monotonic(), done
            self._completed = done
            self._total = self._total if total is None else total
            self._description = self._description if description is None else description
            self._unit = self._unit if unit is None else unit
            self._note = self._note if note is None else note
            if now:
                self._print_now()

    def line(self) -> str:
        """`training 20/420 steps (5%), loss 3.2; 1:02 elapsed, about 20:10 left`."""
        text = self._description
        if self._total:
            share = self._completed / self._total
            text += f" {self._completed:,.0f}/{self._total:,.0f} {self._unit}".rstrip()
            text += f" ({share:.0%})"
        text += f", {self._note}" if self._note else ""
        elapsed = f"{clock_time(time.monotonic() - self._begin)} elapsed"
        left = self._seconds_left()
        return f"{text}; {elapsed}" + ("" if left is None else f", about {clock_time(left)} left")

    def _seconds_left(self) -> float | None:
        since, before = self._counting_from
        done = self._completed - before
        if not self._total or done <= 0 or self._completed >= self._total:
            return None
        return (time.monotonic() - since) / done * (self._total - self._completed)

    def _run(self) -> None:
        while not self._stopped.wait(max(0.01, self._printed_at + EVERY_S - time.monotonic())):
            with self._lock, contextlib.suppress(OSError):  # a closed pipe is handled elsewhere
                if time.monotonic() >= self._printed_at + EVERY_S:
                    self._print_now()

    def _print_now(self) -> None:
        self._printed_at = time.monotonic()
        self._say(self.line())


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
