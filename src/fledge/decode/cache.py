"""A target's keys and values by place: the cache index of a token is its place in the text.

Rows stand left-aligned. A pass writes behind each row's end and sees what its mask shows; what was
rejected is overwritten by the next pass, so taking tokens back costs nothing. Memory stays where it
is while it suffices (recorded passes rely on it): fewer rows use the first ones, more places or
rows get new memory.

Shapes: N new tokens of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Where:
    """What all layers of a cache share: its size, and where their next states go."""

    rows: int = 0
    places: int = 0
    index_BN: Tensor | None = None  # None: behind `before`, in every row
    used: int = 0  # places that the next pass looks at
    before: int = 0  # of them, before its own tokens; models make their own mask from that


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of a `SlotCache`, in the form that transformers asks for."""

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
        """Put the new states in their places; all that the pass looks at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._put(self.keys, key_states), self._put(self.values, value_states)

    def _put(self, held_BGUC: Tensor, states_BGNC: Tensor) -> Tensor:
        where = self._where
        seen_BGUC = held_BGUC[: len(states_BGNC), :, : where.used]
        if where.index_BN is None:
            seen_BGUC[:, :, where.before :] = states_BGNC
        else:  # layers may lie on several devices
            index_BN = where.index_BN.to(held_BGUC.device)
            seen_BGUC.scatter_(2, index_BN[:, None, :, None].expand(states_BGNC.shape), states_BGNC)
        return seen_BGUC

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self._where.used, 0

    def get_seq_length(self) -> int:
        return self._where.before

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:  # the same in transformers 4
        return -1


class SlotCache(Cache):  # type: ignore[misc]
    """The layers of a target, and the memory of them all."""

    def __init__(self, layers: int) -> None:
        self._where = Where()
        super().__init__(layers=[SlotLayer(self._where) for _ in range(layers)])

    def aim(self, index_BN: Tensor | None, *, used: int, count: int) -> None:
        """Where the `count` new tokens of the next pass go, and how far it looks."""
        where = self._where
        where.index_BN, where.used, where.before = index_BN, used, used - count

    def start(self, rows: int, places: int) -> bool:
        """Empty rows; whether the memory has moved."""
        where = self._where
        moved = rows > where.rows or places > where.places
        where.rows, where.places = max(rows, where.rows), max(places, where.places)
        for layer in self._made():
            if moved:
                layer.is_initialized = False
                layer.keys = layer.values = None
            else:
                layer.keys.zero_()
                layer.values.zero_()
        return moved

    def reserve(self, places: int) -> bool:
        """Room for so many places of each row; whether the memory has moved."""
        held_places = self._where.places
        if places <= held_places:
            return False
        self._where.places = max(places, 2 * held_places)
        for layer in self._made():
            for name in ("keys", "values"):
                held = getattr(layer, name)
                more = held.new_zeros((*held.shape[:2], self._where.places, held.shape[3]))
                more[:, :, :held_places] = held
                setattr(layer, name, more)
        return True

    def select(self, rows: list[int]) -> None:
        """Go on with these rows, moved to the front."""
        for layer in self._made():
            for held in (layer.keys, layer.values):
                index = torch.tensor(rows, device=held.device)
                held[: len(rows)] = held.index_select(0, index)

    def move(self, source_BN: Tensor, into_BN: Tensor) -> None:
        """Copy entries of each row to other places of it."""
        batch = len(source_BN)
        for layer in self._made():
            for held in (layer.keys, layer.values):
                shape = (-1, held.shape[1], -1, held.shape[3])
                source, into = (
                    index.to(held.device)[:, None, :, None].expand(shape)
                    for index in (source_BN, into_BN)
                )
                held[:batch].scatter_(2, into, held[:batch].gather(2, source))

    def _made(self) -> list[Any]:
        return [layer for layer in self.layers if layer.is_initialized]
