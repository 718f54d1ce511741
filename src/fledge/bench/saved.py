"""What a step keeps for its backward pass, in bytes and shapes: measured, on any device."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


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
