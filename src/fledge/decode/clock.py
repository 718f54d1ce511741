"""Where the time of decoding goes, measured by device events without synchronization."""

import time
from typing import NamedTuple

import torch


class RoundTime(NamedTuple):
    """Seconds of one round."""

    draft_s: float
    target_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.target_s


class RoundClock:
    """Marks at the beginning of each round, after the draft, and at the end of the round."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._marks: list[tuple[torch.cuda.Event | float, float]] = []

    def mark(self, recording_s: float) -> None:
        """Mark the current time. `recording_s`: seconds spent on recording passes so far, which do
        not count as decoding."""
        if self._cuda is None:
            self._marks.append((time.perf_counter(), recording_s))
        else:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._cuda))
            self._marks.append((event, recording_s))

    def read(self) -> tuple[list[RoundTime], float]:
        """The times of all rounds, and the seconds from the first mark to the last."""
        if not self._marks:
            return [], 0.0
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)
        begins = range(0, len(self._marks), 3)
        times = [RoundTime(self._between(i, i + 1), self._between(i + 1, i + 2)) for i in begins]
        return times, self._between(0, -1)

    def _between(self, first: int, last: int) -> float:
        (begin, recorded_before), (end, recorded_after) = self._marks[first], self._marks[last]
        if isinstance(begin, float):
            assert isinstance(end, float)
            wall_s = end - begin
        else:
            assert not isinstance(end, float)
            wall_s = begin.elapsed_time(end) / 1e3
        return wall_s - (recorded_after - recorded_before)
