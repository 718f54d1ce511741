"""Whole passes as CUDA graphs, so that a GPU does not wait for Python while it decodes.

A pass is plain tensor code that writes into caches. Off the GPU it is simply called. On a GPU it is
recorded the first time its shapes are seen, and replayed with one call from then on. So that shapes
recur, passes read caches in widths of 256, 512, ... instead of exactly what is used, and the caches
stay at the same memory addresses; code that moves them calls `drop_recordings`.

A pass is a function of its arguments and of nothing else: of tensors, whose values may change from
call to call, and of constants (an engine with its caches, a width, a flag), which are part of what
is recorded.

Recording runs a pass twice. So it must give the same results when it is run again on the same
inputs, or provide harmless inputs for the rehearsal. Results are in memory that the next pass,
whichever it is, overwrites.
"""

import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.core.errors import first_line
from fledge.core.graphs import RecordedPass

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_NARROWEST = 256
_MOST_GRAPHS = 32


class Passes:
    """Runs passes, recorded where that pays off. `fixed`: callers should keep shapes fixed."""

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self._device = device
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
        current = torch.cuda.current_stream(self._device)
        # restores the stream after a failure too
        with torch.cuda.device(self._device), torch.cuda.stream(current):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            return RecordedPass(run, inputs, pool=self._pool, stream=self._stream, strict=True)

    def _synchronized_time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
