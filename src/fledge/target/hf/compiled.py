"""A target's forward pass made cheap on a GPU, without changing the model.

`CompiledLayers` gives the decoder layers a compiled forward for one pass: norms, rotary
positions, activations and residuals become a few kernels each. `RecordedPass` goes further for
small models, whose GPU would wait for Python: a whole pass as a CUDA graph, started with one call.
"""

import gc
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fledge.core.errors import first_line

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class CompiledLayers:
    """The compiled forwards of some layers, lent to them while a pass runs."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._forwards: list[tuple[nn.Module, Any]] = [
            (layer, torch.compile(layer.forward))
            for layer in layers
            if "forward" not in layer.__dict__  # offloading tools put their own forward there
        ]
        self._untidy = bool(self._forwards)

    @contextmanager
    def lent(self) -> Iterator[None]:
        for layer, forward in self._forwards:
            layer.forward = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del layer.forward
        if self._untidy:  # the compiler leaves cycles behind, which hold tensors of this pass
            self._untidy = False
            gc.collect()

    def give_up(self, error: BaseException) -> None:
        reason = first_line(error)
        log.warning("the target's layers run as they are: they could not be compiled (%s)", reason)
        self._forwards = []


def compile_errors() -> tuple[type[BaseException], ...]:
    """What torch raises when it cannot compile something."""
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError

    return TorchDynamoException, InductorError


class CommonMemory:
    """What passes of several sizes compute in, one at a time."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        # what was freed on one stream is never given to another
        self.stream = _new_stream()
        self._inputs: dict[Hashable, Tensor] = {}

    def copy_of(self, name: str, tensor: Tensor) -> Tensor:
        """Where an input of this name and shape lies."""
        key = (name, tensor.shape, tensor.dtype)
        if key not in self._inputs:
            self._inputs[key] = torch.empty_like(tensor)
        return self._inputs[key].copy_(tensor)


class RecordedPass(Generic[Result]):
    """`run(**inputs)` recorded once for inputs of one shape; each call copies new inputs in.

    The results lie in the graph's own memory: the next call overwrites them. Passes that are given
    the same `pool` and `stream`, or `common` memory, share it: there, the next call of *any* of
    them does.

    A pass that waits for the GPU cannot be recorded, and the failed attempt leaves traces in torch.
    `strict` detects it beforehand: such a pass raises `RuntimeError` in its trial run. (During the
    trial run no thread may wait.)
    """

    def __init__(
        self,
        run: Callable[..., Result],
        inputs: dict[str, Tensor],
        *,
        pool: Any = None,  # torch.cuda.graph_pool_handle()
        stream: torch.cuda.Stream | None = None,  # to record on; each keeps memory of its own
        common: CommonMemory | None = None,
        strict: bool = False,
    ) -> None:
        self._run = run  # the graph reads whatever it refers to, wherever it lay
        if common is None:
            self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        else:
            pool, stream = common.pool, common.stream
            self._inputs = {name: common.copy_of(name, given) for name, given in inputs.items()}
        side = stream or _new_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compile, choose algorithms, fill caches
            run(**self._inputs)
            with _waiting_forbidden() if strict else nullcontext():
                run(**self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # a stream of its own: the default one of torch belongs to the device that recorded first;
        # thread_local: other threads may go on preparing batches meanwhile
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
    """Recorded passes by size: only of sizes that come back, and only so many, the last used ones,
    because each holds memory of its own. Those that are `sharing` it hold little, and have results
    until the next call of any."""

    def __init__(self, most: int = 8, *, sharing: bool = False) -> None:
        self._most, self._sharing = most, sharing
        self._met: set[Hashable] = set()
        self._held: dict[Hashable, RecordedPass[Result]] = {}

    @cached_property
    def memory(self) -> CommonMemory | None:
        """What those that share compute in; other passes in between may, too."""
        return CommonMemory() if self._sharing else None

    @property
    def sizes(self) -> list[Hashable]:
        """Those that are recorded, last used last."""
        return list(self._held)

    def comes_back(self, size: Hashable) -> bool:
        """Whether this size was asked about before: where every batch has a size of its own,
        recording gains nothing."""
        met = size in self._met
        self._met.add(size)
        return met

    def __call__(
        self, size: Hashable, run: Callable[..., Result], inputs: dict[str, Tensor]
    ) -> Result:
        """`run(**inputs)`, which depends on nothing else but its size."""
        recorded = self._held.pop(size, None)
        if recorded is None:
            while len(self._held) >= self._most:
                del self._held[next(iter(self._held))]
            recorded = RecordedPass(run, inputs, common=self.memory)
        self._held[size] = recorded
        return recorded(inputs)

    def forget(self) -> None:
        self._held.clear()


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch gives it no types


@contextmanager
def _waiting_forbidden() -> Iterator[None]:
    """While open, what makes the host wait for the GPU raises `RuntimeError`."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
