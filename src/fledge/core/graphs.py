"""CUDA graphs: work on a GPU that is recorded once and then launched with one call.

Small models are limited by kernel launches rather than by arithmetic. Targets, training steps and
decoding record whole passes of recurring sizes.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

Result = TypeVar("Result")

_STALE = 200  # calls


class CommonMemory:
    """Memory shared by recorded passes of several sizes, which run one at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # one stream for all: memory freed on one stream is never reused by another
        self.stream = _new_stream()
        self._inputs: dict[Hashable, Tensor] = {}

    def copy_of(self, name: str, tensor: Tensor) -> Tensor:
        """The static buffer for an input of this name and shape, filled with `tensor`."""
        key = (name, tensor.shape, tensor.dtype)
        if key not in self._inputs:
            self._inputs[key] = torch.empty_like(tensor)
        return self._inputs[key].copy_(tensor)


class RecordedPass(Generic[Result]):
    """`run(**inputs)` recorded once for inputs of one shape; each call copies new inputs in.

    The results are in the graph's own memory: the next call overwrites them. Passes that get the
    same `pool` and `stream`, or the same `common` memory, share it: there, the next call of *any*
    of them overwrites the results.

    A pass that synchronizes with the GPU cannot be recorded, and the failed attempt leaves torch in
    a bad state. `strict` detects this beforehand: such a pass raises `RuntimeError` in its trial
    run. (During the trial run no thread may synchronize.)
    """

    def __init__(
        self,
        run: Callable[..., Result],
        inputs: dict[str, Tensor],
        *,
        pool: Any = None,  # torch.cuda.graph_pool_handle()
        stream: torch.cuda.Stream | None = None,  # to record on; each has its own memory
        common: CommonMemory | None = None,
        strict: bool = False,
    ) -> None:
        here = torch.cuda.current_device
        if any(tensor.is_cuda and tensor.device.index != here() for tensor in inputs.values()):
            raise RuntimeError("recording: the inputs are not on the current device")
        self._run = run  # keeps alive the tensors whose addresses the graph reads
        if common is None:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        else:
            pool, stream = common.pool, common.stream
            self._inputs = {name: common.copy_of(name, tensor) for name, tensor in inputs.items()}
        side = stream or _new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm up: compile, choose algorithms, fill caches
            run(**self._inputs)
            with _forbid_synchronization() if strict else nullcontext():
                run(**self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # an explicit stream: torch's default one belongs to the device that recorded first;
        # thread_local: other threads may keep preparing batches meanwhile
        with torch.cuda.graph(
            self._graph, pool=pool, stream=side, capture_error_mode="thread_local"
        ):
            self._results = run(**self._inputs)

    def __call__(self, inputs: dict[str, Tensor]) -> Result:
        for name, tensor in inputs.items():
            self._inputs[name].copy_(tensor)
        self._graph.replay()
        return self._results


class RecordedSizes(Generic[Result]):
    """Recorded passes by size: only of sizes that recur, and at most `most` of them, because each
    holds its own memory. When `sharing` memory they hold little, but results last only until the
    next call of any size.

    Recording takes as long as many passes. So where more sizes recur than are kept, a
    recording is replaced only after `_STALE` calls without it, and other sizes are not recorded.
    """

    def __init__(self, most: int = 8, *, sharing: bool = False) -> None:
        self._most, self._sharing = most, sharing
        self._calls = 0
        self._seen_sizes: dict[Hashable, int] = {}  # and the last call with each
        self._passes: dict[Hashable, RecordedPass[Result]] = {}

    @cached_property
    def memory(self) -> CommonMemory | None:
        """The shared memory, or None if not `sharing`; other passes may use it in between."""
        return CommonMemory() if self._sharing else None

    @property
    def sizes(self) -> list[Hashable]:
        """The recorded sizes, most recently used last."""
        return list(self._passes)

    def worth_it(self, size: Hashable) -> bool:
        """Whether a pass of this size is recorded, or should be: this method, which is called once
        before each pass, has seen the size before, and one can be added."""
        self._calls += 1
        seen_before = size in self._seen_sizes
        self._seen_sizes[size] = self._calls
        return size in self._passes or (seen_before and self._can_add())

    def _can_add(self) -> bool:
        if len(self._passes) < self._most:
            return True
        oldest = next(iter(self._passes))
        return self._calls - self._seen_sizes.get(oldest, 0) > _STALE

    def __call__(
        self, size: Hashable, run: Callable[..., Result], inputs: dict[str, Tensor]
    ) -> Result:
        """`run(**inputs)`, where `run` must depend on nothing but its inputs and their size."""
        recorded = self._passes.pop(size, None)
        if recorded is None:
            while len(self._passes) >= self._most:
                del self._passes[next(iter(self._passes))]
            recorded = RecordedPass(run, inputs, common=self.memory)
        self._passes[size] = recorded
        return recorded(inputs)

    def forget(self) -> None:
        """Drop all recordings."""
        self._passes.clear()


# --- the inputs of a pass -------------------------------------------------------------------------


def tensors_of(part: Any) -> dict[str, Tensor]:
    """All tensors in nested dataclasses and tuples, by path; each once."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _named_tensors(part):
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def with_tensors(part: Any, given: Mapping[str, Tensor]) -> Any:
    """The same with other tensors of the same names. Pairs of arrays on the host, which describe
    the tensors of one batch, are left out."""
    replacing = {id(tensor): given[name] for name, tensor in tensors_of(part).items()}
    return _replaced(part, replacing)


def _named_tensors(part: Any, path: str = "plan") -> Iterator[tuple[str, Tensor]]:
    if isinstance(part, Tensor):
        yield path, part
    elif is_dataclass(part):
        for field in fields(part):
            yield from _named_tensors(getattr(part, field.name), f"{path}_{field.name}")
    elif isinstance(part, tuple):
        for index, item in enumerate(part):
            yield from _named_tensors(item, f"{path}_{index}")


def _replaced(part: Any, replacing: Mapping[int, Tensor]) -> Any:
    if isinstance(part, Tensor):
        return replacing[id(part)]
    if is_dataclass(part) and not isinstance(part, type):
        names = [field.name for field in fields(part)]
        return replace(part, **{name: _replaced(getattr(part, name), replacing) for name in names})
    if isinstance(part, tuple):
        on_host = any(isinstance(x, np.ndarray) for x in part)
        return None if on_host else tuple(_replaced(x, replacing) for x in part)
    return part


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # untyped in torch


@contextmanager
def _forbid_synchronization() -> Iterator[None]:
    """While open, anything that makes the host wait for the GPU raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
