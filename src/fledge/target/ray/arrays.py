"""Tensors in transit through Ray's object store: bytes that it neither copies nor pickles.

Ray delivers numpy arrays as read-only views of shared memory; the receiver copies an answer once,
into its own memory (page-locked if it goes to a GPU next).
"""

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class Array:
    """A tensor of any dtype as bytes."""

    data: NDArray[Any]  # uint8, flat
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Array":
        tensor = tensor.detach().cpu().contiguous()
        return cls(tensor.flatten().view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))

    def tensor(self, *, pin_memory: bool = False) -> Tensor:
        """A copy that the caller owns."""
        copy = torch.empty(self.shape, dtype=self.dtype, pin_memory=pin_memory)
        copy.flatten().view(torch.uint8).numpy()[:] = self.data
        return copy


Arrays = dict[str, Array]
