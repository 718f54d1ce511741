"""Whole passes as CUDA graphs, so that a GPU does not wait for Python while it decodes.

On a GPU a pass is recorded the first time its shapes are seen, elsewhere it is called. So that
shapes recur, passes read caches in widths of 256, 512, ..., and caches keep their addresses; code
that moves them calls `drop_recordings`. `RoundClock` times passes, and leaves out the recording.
"""

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fledge.core.errors import first_line
from fledge.core.graphs import RecordedPass
from fledge.core.transfer import record_event

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_NARROWEST = 256
_MOST_GRAPHS = 32


class Passes:
    """Runs passes, recorded where that pays off. `fixed`: callers should keep shapes fixed.

    A pass is plain tensor code that writes into caches: a function of tensors, whose values may
    change, and of constants (an engine, a width, a flag), which are part of what is recorded. As
    recording runs it twice, it gives the same results when it is run again on the same inputs, or
    has harmless inputs to rehearse with. Its results are in memory that the next pass overwrites.
    """

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self.device = device
        self._can_record = record and device.type == "cuda"
        self.fixed = False
        self.recording_s = 0.0  # spent on recording since `begin`
        self._graphs: dict[Any, Callable[[dict[str, Tensor]], Any]] = {}
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, *, greedy: bool) -> None:
        """Prepare for new texts. Sampling is not recorded: its random numbers would repeat."""
        self.fixed = self._can_record and greedy
        self.recording_s = 0.0

    def room(self, needed: int) -> int:
        """The number of cache entries to read when `needed` are in use."""
        if not self.fixed:
            return needed
        return max(_NARROWEST, 1 << (needed - 1).bit_length())

    def drop_recordings(self) -> None:
        """Discard all recordings, because the caches have moved in memory."""
        self._graphs.clear()
        self._pool = None

    def __call__(
        self,
        run: Callable[..., Result],
        tensors: dict[str, Tensor],
        *,
        rehearse: Callable[..., dict[str, Tensor]] | None = None,
        **constants: Hashable,
    ) -> Result:
        """Return `run(**tensors, **constants)`; `rehearse(**tensors)` returns tensors to record
        with instead."""
        if not self.fixed:
            return run(**tensors, **constants)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors.values()]
        key = (run, tuple(constants.items()), *shapes)
        if key not in self._graphs:
            rehearsal = tensors if rehearse is None else rehearse(**tensors)
            if not self._try_record(key, partial(run, **constants), rehearsal):
                return run(**tensors, **constants)
        graph = self._graphs[key] = self._graphs.pop(key)  # most recently used: evicted last
        result: Result = graph(tensors)
        return result

    def _try_record(self, key: Any, run: Callable[..., Result], inputs: dict[str, Tensor]) -> bool:
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        begin = self._synchronized_time()
        try:
            self._graphs[key] = self._recorded(run, inputs)
        except RuntimeError as error:  # what torch and CUDA raise, out of memory included
            reason = first_line(error)
            log.warning("decoding runs step by step: a pass could not be recorded (%s)", reason)
            self._can_record = self.fixed = False
            self.drop_recordings()
        self.recording_s += self._synchronized_time() - begin
        return key in self._graphs

    def _recorded(
        self, run: Callable[..., Result], inputs: dict[str, Tensor]
    ) -> Callable[[dict[str, Tensor]], Result]:
        current = torch.cuda.current_stream(self.device)
        # restores the stream after a failure too
        with torch.cuda.device(self.device), torch.cuda.stream(current):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            return RecordedPass(run, inputs, pool=self._pool, stream=self._stream, strict=True)

    def _synchronized_time(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class RoundTime(NamedTuple):
    """Seconds of one round."""

    draft_s: float
    target_s: float

    @property
    def seconds(self) -> float:
        return self.draft_s + self.target_s


@dataclass(frozen=True)
class Timing:
    """Where the time of one `generate` call went after the prompts were read."""

    each: list[RoundTime]  # per round, in which a batch counts once: a mean would hide outliers
    decode_s: float

    @property
    def rounds(self) -> int:
        """Passes of the target."""
        return len(self.each)


class RoundClock:
    """Marks at the beginning of each round, after the draft, and at the end of the round; time that
    was spent on recording passes does not count."""

    def __init__(self, passes: Passes) -> None:
        self._passes, self._device = passes, passes.device
        self._marks: list[tuple[Any, float]] = []  # (seconds or an event, seconds of recording)

    def mark(self) -> None:
        on_gpu = self._device.type == "cuda"
        now = record_event(self._device, timed=True) if on_gpu else time.perf_counter()
        self._marks.append((now, self._passes.recording_s))

    def read(self) -> Timing:
        """The times of all rounds, and the seconds from the first mark to the last."""
        if not self._marks:
            return Timing([], 0.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        begins = range(0, len(self._marks), 3)
        times = [RoundTime(self._between(i, i + 1), self._between(i + 1, i + 2)) for i in begins]
        return Timing(times, self._between(0, -1))

    def _between(self, first: int, last: int) -> float:
        (begin, recorded_before), (end, recorded_after) = self._marks[first], self._marks[last]
        on_gpu = self._device.type == "cuda"
        wall_s: float = begin.elapsed_time(end) / 1e3 if on_gpu else end - begin
        return wall_s - (recorded_after - recorded_before)
