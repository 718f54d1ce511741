"""Memory of tensors, counted at every operation, and what autograd keeps of a step.

For any device: a CPU allocator reports no peak. Tests use it, too.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE = 4096  # what is smaller is not worth the question whether it is memory


class LiveBytes(TorchDispatchMode):
    """While open, `peak` is the most bytes that tensors seen since then held at one time, and
    `largest` those of the largest one.

    What takes no memory does not count: meta and fake tensors, and files that are mapped, of which
    only what is read is there. Of a tensor that ranks share, this rank's part counts. Sees only the
    thread that opened it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.largest = 0
        self._live: dict[int, _Seen] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by afterwards
        for leaf in tree_leaves((args, kwargs)):
            self._see(leaf, ours=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._see(leaf, ours=True)
        sizes = {key: seen.size() for key, seen in self._live.items()}
        self._live = {key: self._live[key] for key, size in sizes.items() if size is not None}
        self.peak = max(self.peak, sum(size or 0 for size in sizes.values()))
        return result

    def _see(self, leaf: object, *, ours: bool) -> None:
        """Count a tensor; `ours` were made by an op, others out of our sight."""
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor) or leaf.is_meta:
            return
        storage = leaf.untyped_storage()
        self.largest = max(self.largest, self._counted(storage, leaf.dtype, ours))

    def _counted(self, storage: torch.UntypedStorage, dtype: torch.dtype, ours: bool) -> int:
        seen = self._live.get(storage._cdata)
        if seen is None or seen.size() is None:
            plain = ours and dtype != torch.uint8  # a window on a file comes as bytes
            seen = _Seen(storage, is_file=not plain and _is_mapped(storage))
            self._live[storage._cdata] = seen
        return seen.size() or 0


class _Seen:
    """A storage that is not kept alive by being counted."""

    def __init__(self, storage: torch.UntypedStorage, *, is_file: bool) -> None:
        self._reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._is_file = is_file

    def size(self) -> int | None:
        """Bytes now: FSDP2 keeps storages and gives their memory back. None: it is gone."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        if storage is None:
            return None
        return 0 if self._is_file else int(storage.nbytes())


def _is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether a storage is a window on a file."""
    maps, address = Path("/proc/self/maps"), storage.data_ptr()
    if storage.device.type != "cpu" or storage.nbytes() < _PAGE or not maps.exists():
        return False
    for line in maps.read_text().splitlines():
        span, *_, inode, path = (*line.split(maxsplit=5), "")[:6]
        begin, end = (int(number, 16) for number in span.split("-"))
        if begin <= address < end:
            return inode != "0" and path != ""
    return False


# --- saved tensors -------------------------------------------------------------------------------
# What a step keeps for its backward pass, in bytes and shapes: measured, on any device.


@dataclass
class Saved:
    """The storages that autograd keeps, each counted once, and the shapes it keeps them in."""

    known: frozenset[int]  # storages that were there before, weights for example: not counted
    storages: dict[int, int] = field(default_factory=dict)  # address -> bytes
    shapes: set[tuple[int, ...]] = field(default_factory=set)

    @property
    def total_bytes(self) -> int:
        return sum(self.storages.values())

    def keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage.nbytes()
            self.shapes.add(tuple(tensor.shape))
        return tensor


@contextmanager
def watch_saved(weights: Iterable[Tensor]) -> Iterator[Saved]:
    """Counts what is saved inside. Addresses stand for storages only while these live: look before
    the backward pass lets go of them."""
    saved = Saved(frozenset(weight.untyped_storage().data_ptr() for weight in weights))
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        yield saved
