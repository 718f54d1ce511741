"""What long work reports to, and how its reports look in logs and under Slurm."""

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
    """A progress bar as lines of text, where there is no terminal."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._what = say, ""
        self._begin = self._printed_at = time.monotonic()
        self._since = self._begin, 0.0  # when this activity began, and at which count

    def __call__(
        self, what: str, done: float = 0, total: float = 0, unit: str = "", note: str = "", *,
        now: bool = False,
    ) -> None:  # fmt: skip
        seconds = time.monotonic()
        if what != self._what:
            self._what, self._since = what, (seconds, done)
        if not now and seconds < self._printed_at + EVERY_S:
            return
        self._printed_at, (since, before) = seconds, self._since
        text, left = what, ""
        if total:
            text += f" {done:,.0f}/{total:,.0f} {unit}".rstrip() + f" ({done / total:.0%})"
            if before < done < total:
                rest = (seconds - since) / (done - before) * (total - done)
                left = f", about {clock_time(rest)} left"
        text += f", {note}" if note else ""
        self._say(f"{text}; {clock_time(seconds - self._begin)} elapsed{left}")

    def say(self, text: str) -> None:
        self._say(text)


def clock_time(seconds: float) -> str:
    """0:07, 12:30, 3:00:00."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
