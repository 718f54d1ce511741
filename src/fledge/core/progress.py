"""What long work reports to, and how its reports look in logs and under Slurm.

Where there is no terminal for a bar, a thread of its own prints a line at intervals, so that a step
of several minutes is not silent.
"""

import contextlib
import threading
import time
from collections.abc import Callable

EVERY_S = 10.0  # between two lines, unless one is requested


class Progress:
    """Receives the reports of long work; this one ignores them."""

    def __call__(
        self, what: str, done: float = 0, total: float = 0, unit: str = "", note: str = "", *,
        now: bool = False,
    ) -> None:  # fmt: skip
        """What is being done, and how much of it is (0 of 0: unknown). In logs, `now` prints a
        line at once."""

    def say(self, text: str) -> None:
        """One line that stays."""


Watch = Callable[[str, float, float], None]  # activity, done, total: what users may pass instead
unwatched = Progress()


class PlainProgress(Progress):
    """A progress bar as lines of text."""

    def __init__(self, say: Callable[[str], None], what: str) -> None:
        self._print = say
        self._what, self._unit, self._note = what, "", ""
        self._done, self._total = 0.0, 0.0
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

    def __call__(
        self, what: str, done: float = 0, total: float = 0, unit: str = "", note: str = "", *,
        now: bool = False,
    ) -> None:  # fmt: skip
        with self._lock:
            uncounted = what != self._what and done == self._counting_from[1]
            if uncounted or done < self._done or total != self._total:
                self._counting_from = time.monotonic(), done
            self._what, self._done, self._total = what, done, total
            self._unit, self._note = unit, note
            if now:
                self._print_now()

    def say(self, text: str) -> None:
        self._print(text)

    def line(self) -> str:
        """`training 20/420 steps (5%), loss 3.2; 1:02 elapsed, about 20:10 left`."""
        now, (since, before) = time.monotonic(), self._counting_from
        text, left = self._what, ""
        if self._total:
            text += f" {self._done:,.0f}/{self._total:,.0f} {self._unit}".rstrip()
            text += f" ({self._done / self._total:.0%})"
            if before < self._done < self._total:
                seconds = (now - since) / (self._done - before) * (self._total - self._done)
                left = f", about {clock_time(seconds)} left"
        text += f", {self._note}" if self._note else ""
        return f"{text}; {clock_time(now - self._begin)} elapsed{left}"

    def _run(self) -> None:
        while not self._stopped.wait(max(0.01, self._printed_at + EVERY_S - time.monotonic())):
            with self._lock, contextlib.suppress(OSError):  # a closed pipe is handled elsewhere
                if time.monotonic() >= self._printed_at + EVERY_S:
                    self._print_now()

    def _print_now(self) -> None:
        self._printed_at = time.monotonic()
        self._print(self.line())


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
