"""Memory of tensors, counted op by op: on a CPU nobody else says which of it a process needs."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While open, `peak` is the most bytes that tensors seen since then held at one time, and
    `largest` those of the largest one. Tensors without memory (meta) do not count; of a tensor that
    ranks share, this rank's part does. Sees the thread that opened it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self.largest = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its parts come by afterwards
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf)
        self._live = {key: seen for key, seen in self._live.items() if not seen[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.largest = max(self.largest, storage.nbytes())
        self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
