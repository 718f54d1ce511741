"""Whole passes as CUDA graphs, so that a GPU does not wait for Python while it decodes.

A pass is plain tensor code that writes into caches. Everywhere but on a GPU it is simply called. On
a GPU it is recorded the first time its shapes are seen, and from then on started with one call. So
that shapes come back, caches are then looked at in widths of 256, 512, ... instead of exactly what
is used, and the memory of the caches stays where it is; whoever moves it calls `drop_recordings`.

A pass is a function of its arguments and of nothing else: of tensors, whose values may change from
call to call, and of constants (an engine with its caches, a width, a flag), which are part of what
is recorded.

Recording runs a pass twice. So it must give the same results when it is run again on the same
inputs, or name inputs for the rehearsal that do no harm. Results lie in memory that the next pass,
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
from fledge.target.hf.compiled import RecordedPass

log = logging.getLogger(__name__)
Result = TypeVar("Result")

_NARROWEST = 256
_MOST_GRAPHS = 32


class Passes:
    """Runs passes, recorded where that pays. `fixed`: shapes should stay as they are."""

    def __init__(self, device: torch.device, *, record: bool = True) -> None:
        self._device = device
        self._able = record and device.type == "cuda"
        self.fixed = False
        self.recording_s = 0.0  # spent on recording since `begin`
        self._held: dict[Any, Callable[[dict[str, Tensor]], Any]] = {}
        self._pool: tuple[int, int] | None = None
        self._stream: torch.cuda.Stream | None = None

    def begin(self, *, greedy: bool) -> None:
        """Before a text: drawn tokens are not recorded, their random numbers would repeat."""
        self.fixed = self._able and greedy
        self.recording_s = 0.0

    def room(self, needed: int) -> int:
        """How many cache entries to look at when `needed` are in use."""
        if not self.fixed:
            return needed
        return max(_NARROWEST, 1 << (needed - 1).bit_length())

    def drop_recordings(self) -> None:
        """Record everything anew: the caches lie elsewhere now."""
        self._held.clear()
        self._pool = None

    def __call__(
        self,
        run: Callable[..., Result],
        tensors: dict[str, Tensor],
        *,
        rehearse: Callable[..., dict[str, Tensor]] | None = None,
        **constants: Hashable,
    ) -> Result:
        """`run(**tensors, **constants)`; `rehearse(**tensors)`: tensors to record with instead."""
        if not self.fixed:
            return run(**tensors, **constants)
        shapes = [(tensor.shape, tensor.dtype) for tensor in tensors.values()]
        key = (run, tuple(constants.items()), *shapes)
        if key not in self._held:
            rehearsal = tensors if rehearse is None else rehearse(**tensors)
            if not self._learn(key, partial(run, **constants), rehearsal):
                return run(**tensors, **constants)
        held = self._held[key] = self._held.pop(key)  # the last to be thrown out
        result: Result = held(tensors)
        return result

    def _learn(self, key: Any, run: Callable[..., Result], inputs: dict[str, Tensor]) -> bool:
        while len(self._held) >= _MOST_GRAPHS:
            del self._held[next(iter(self._held))]
        begin = self._now()
        try:
            self._held[key] = self._recorded(run, inputs)
        except RuntimeError as error:  # what torch and CUDA raise, out of memory included
            reason = first_line(error)
            log.warning("decoding runs step by step: a pass could not be recorded (%s)", reason)
            self._able = self.fixed = False
            self.drop_recordings()
        self.recording_s += self._now() - begin
        return key in self._held

    def _recorded(
        self, run: Callable[..., Result], inputs: dict[str, Tensor]
    ) -> Callable[[dict[str, Tensor]], Result]:
        here = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(here):  # also after a failure
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            return RecordedPass(run, inputs, pool=self._pool, stream=self._stream, strict=True)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
