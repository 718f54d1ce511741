"""A target's keys and values by place: the cache index of a token is its place in the text.

Rows are left-aligned. A pass writes after each row's end and attends to what its mask shows; what
was rejected is overwritten by the next pass, so rolling back tokens costs nothing. The memory is
not moved while it suffices (recorded passes rely on that): fewer rows use the first ones; more
places or rows need new memory.

Shapes: N new tokens of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Where:
    """What all layers of a cache share: its size, and where the next states go."""

    rows: int = 0
    places: int = 0
    index_BN: Tensor | None = None  # None: from `before` on, in every row
    used: int = 0  # places that the next pass reads
    before: int = 0  # of these, before its new tokens; models derive their own mask from that


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `SlotCache`, with the interface that transformers expects."""

    is_sliding = False  # every token is kept; the mask implements windows

    def __init__(self, where: Where) -> None:
        super().__init__()
        self._where = where

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, places = self._where.rows, self._where.places
        self.keys, self.values = (
            states.new_zeros((rows, states.shape[1], places, states.shape[3]))
            for states in (key_states, value_states)
        )  # zeros, not garbage: a masked NaN is still a NaN
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new states to their places; returns all keys and values that the pass reads."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, memory_BGUC: Tensor, states_BGNC: Tensor) -> Tensor:
        where = self._where
        used_BGUC = memory_BGUC[: len(states_BGNC), :, : where.used]
        if where.index_BN is None:
            used_BGUC[:, :, where.before :] = states_BGNC
        else:  # layers may be on several devices
            index_BN = where.index_BN.to(memory_BGUC.device)
            used_BGUC.scatter_(2, index_BN[:, None, :, None].expand(states_BGNC.shape), states_BGNC)
        return used_BGUC

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self._where.used, 0

    def get_seq_length(self) -> int:
        return self._where.before

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # its name in transformers 4
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The cache of all layers of a target."""

    def __init__(self, layers: int) -> None:
        self._where = Where()
        super().__init__(layers=[SlotLayer(self._where) for _ in range(layers)])

    def aim(self, index_BN: Tensor | None, *, used: int, count: int) -> None:
        """Set where the `count` new tokens of the next pass go, and how many places it reads."""
        where = self._where
        where.index_BN, where.used, where.before = index_BN, used, used - count

    def start(self, rows: int, places: int) -> bool:
        """Clear the cache for `rows` rows; returns whether the memory has moved."""
        where = self._where
        moved = rows > where.rows or places > where.places
        where.rows, where.places = max(rows, where.rows), max(places, where.places)
        for layer in self._initialized_layers():
            if moved:
                layer.is_initialized = False
                layer.keys = layer.values = None
            else:
                layer.keys.zero_()
                layer.values.zero_()
        return moved

    def reserve(self, places: int) -> bool:
        """Make room for `places` places per row; returns whether the memory has moved."""
        old_places = self._where.places
        if places <= old_places:
            return False
        self._where.places = max(places, 2 * old_places)
        for layer in self._initialized_layers():
            for name in ("keys", "values"):
                old = getattr(layer, name)
                new = old.new_zeros((*old.shape[:2], self._where.places, old.shape[3]))
                new[:, :, :old_places] = old
                setattr(layer, name, new)
        return True

    def select(self, rows: list[int]) -> None:
        """Keep these rows only, moved to the front."""
        for layer in self._initialized_layers():
            for memory in (layer.keys, layer.values):
                index = torch.tensor(rows, device=memory.device)
                memory[: len(rows)] = memory.index_select(0, index)

    def move(self, source_BN: Tensor, into_BN: Tensor) -> None:
        """Copy entries of each row to other places of the same row."""
        batch = len(source_BN)
        for layer in self._initialized_layers():
            for memory in (layer.keys, layer.values):
                shape = (-1, memory.shape[1], -1, memory.shape[3])
                source, into = (
                    index.to(memory.device)[:, None, :, None].expand(shape)
                    for index in (source_BN, into_BN)
                )
                memory[:batch].scatter_(2, into, memory[:batch].gather(2, source))

    def _initialized_layers(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]
