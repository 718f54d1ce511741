"""Tensors on their way through Ray's object store: bytes that it neither copies nor pickles.

Ray hands numpy arrays over as views of shared memory, which nobody may write to; whoever takes an
answer copies it once, into memory of its own (page-locked where a GPU is next).
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
