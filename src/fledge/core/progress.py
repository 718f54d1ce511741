"""Progress where there is no terminal for a bar: in logs and under Slurm.

Prints a line at intervals, from a separate thread, so that a step of several minutes is not silent.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

Watch = Callable[[str, float, int], None]  # current activity, done, total


def unwatched(what: str, done: float, total: int) -> None:
    """A `Watch` that shows nothing."""


EVERY_S = 10.0  # between two lines, unless one is requested


class PlainProgress:
    """A progress bar as lines of text; same arguments as `fledge.cli.console.progress_bar`."""

    def __init__(self, say: Callable[[str], None], what: str, unit: str = "") -> None:
        self._say = say
        self._shown: dict[str, Any] = {
            "description": what, "unit": unit, "note": "", "completed": 0.0, "total": None,
        }  # fmt: skip
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

    def update(self, *, advance: float = 0, now: bool = False, **changes: Any) -> None:
        """Change the description, unit, note, total or completed count. `now` prints a line at
        once, however recent the last one is."""
        with self._lock:
            given = {name: value for name, value in changes.items() if value is not None}
            before, self._shown = self._shown, self._shown | given
            self._shown["completed"] += advance
            done = self._shown["completed"]
            renamed = before["description"] != self._shown["description"]
            restart = renamed and done == self._counting_from[1]  # nothing was counted before
            if restart or done < before["completed"] or before["total"] != self._shown["total"]:
                self._counting_from = time.monotonic(), done
            if now:
                self._print_now()

    def line(self) -> str:
        """`training 20/420 steps (5%), loss 3.2; 1:02 elapsed, about 20:10 left`."""
        text, done, total = (self._shown[name] for name in ("description", "completed", "total"))
        if total:
            text += f" {done:,.0f}/{total:,.0f} {self._shown['unit']}".rstrip()
            text += f" ({done / total:.0%})"
        text += f", {self._shown['note']}" if self._shown["note"] else ""
        since, before = self._counting_from
        left = ""
        if total and before < done < total:
            left_s = (time.monotonic() - since) / (done - before) * (total - done)
            left = f", about {clock_time(left_s)} left"
        return f"{text}; {clock_time(time.monotonic() - self._begin)} elapsed{left}"

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
