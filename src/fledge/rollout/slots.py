"""The inputs of planning, on the host: the slots of a batch on one flat axis, and the key axis.

`plan.py` explains the purpose of the two axes; `context.py` splits the key axis between ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.core.rows import TokenBatch
from fledge.rollout.cod import Bools, Documents, Ints


@dataclass(frozen=True)
class Slots:
    """The batch flattened to one axis of B * T slots, on the host."""

    start: Ints  # first slot of the slot's document
    end: Ints  # one past its last slot, padding included
    real: Bools
    target: Bools  # the slot holds something to predict
    reach: Ints  # depths k < reach stay inside the document
    position: Ints

    @property
    def documents(self) -> Documents:
        """The slots in the form that sampling takes."""
        ordinal: Ints = np.unique(self.start, return_inverse=True)[1].astype(np.int64)
        place = np.arange(len(self.start), dtype=np.int64) - self.start
        return Documents(self.target, ordinal, place)


class RowMasks(NamedTuple):
    """What a plan reads from a batch, on any device; the loss mask is shifted."""

    loss_mask: Tensor  # [B, T]
    attention_mask: Tensor
    position_ids: Tensor | None = None
    seq_lens: Tensor | None = None
    doc_remaining: Tensor | None = None

    @classmethod
    def of(cls, rows: TokenBatch, loss_mask: Tensor) -> "RowMasks":
        packing = (rows.position_ids, rows.seq_lens, rows.doc_remaining)
        return cls(loss_mask, rows.attention_mask, *packing)


def flatten_slots(masks: RowMasks) -> Slots:
    loss_mask, attention_mask, *packing = masks
    rows, width = loss_mask.shape
    loss, attend, position, lens, remaining = _to_host(
        [loss_mask != 0, attention_mask != 0, *packing]
    )
    assert loss is not None
    assert attend is not None
    index = np.arange(rows * width, dtype=np.int64)
    real = attend.reshape(-1) != 0
    if unpacked := lens is None:  # left padding is a document of its own, without rows
        ahead = np.argmax(real.reshape(rows, width), axis=1) if width else np.zeros(rows, np.int64)
        lens = np.stack([ahead, width - ahead], axis=1)
    start, end = _document_bounds(lens, width)
    reach = end - index
    if remaining is None and not unpacked:
        count = np.cumsum(real)
        remaining = count[end - 1] - count
    if remaining is not None:
        reach = np.minimum(reach, remaining.reshape(-1))
    place = index - start if position is None else position.reshape(-1)
    if (place - place[start] != index - start)[real].any():
        raise ValueError("position_ids: positions must rise by one inside a document")
    if unpacked and (place != index - start)[real].any():
        raise ValueError("position_ids: without seq_lens a row's tokens are at 0 .. n - 1")
    target = (loss.reshape(-1) != 0) & real & (reach > 0)
    return Slots(start, end, real, target, reach, place)


def _to_host(tensors: list[Tensor | None]) -> list[Ints | None]:
    """Copy all tensors at once, so that a batch on the device needs one synchronization."""
    present = [tensor for tensor in tensors if tensor is not None]
    flat = torch.cat([tensor.detach().reshape(-1).to(torch.int64) for tensor in present]).cpu()
    parts = iter(torch.split(flat, [tensor.numel() for tensor in present]))
    return [
        None if tensor is None else next(parts).numpy().reshape(tuple(tensor.shape))
        for tensor in tensors
    ]


def _document_bounds(lens: Ints, width: int) -> tuple[Ints, Ints]:
    if (lens < 0).any() or (lens.sum(axis=1) != width).any():
        raise ValueError(
            f"seq_lens: every row must sum to the width {width}, got {lens.sum(axis=1).tolist()}"
        )
    flat = lens.reshape(-1)
    end = np.cumsum(flat)
    return np.repeat(end - flat, flat), np.repeat(end, flat)


class KeyAxis(NamedTuple):
    """The slots that some row attends to, and the rows on them, on the host."""

    slot: Ints  # [T] position in the flattened batch
    first: Ints  # [T] key-axis index of the first slot of the document
    position: Ints  # [T]
    row_slot: Ints  # [N] anchors of depth 0 in the flattened batch, deepest rollouts first
    row_key: Ints  # [N] the same on the key axis
    counts: tuple[int, ...]  # rows per depth


def key_axis(slots: Slots, last_S: Ints, num_depths: int) -> KeyAxis:
    """The key axis of a batch. `last_S`: the deepest depth of each slot's rollout, -1 where none
    starts."""
    index = np.arange(len(last_S), dtype=np.int64)
    last_anchor = per_document(slots, np.where(last_S >= 0, index, -1), np.maximum)
    keep = np.flatnonzero(index <= last_anchor)
    if not slots.real[keep].all():
        raise ValueError("attention_mask: padding lies inside a document, not at a row's ends")
    key_of = np.cumsum(index <= last_anchor) - 1  # slot -> key axis
    anchors = np.flatnonzero(last_S >= 0)
    rows = anchors[np.lexsort((anchors, -last_S[anchors]))]
    counts = tuple(int((last_S >= k).sum()) for k in range(num_depths))
    first, position = key_of[slots.start[keep]], slots.position[keep]
    return KeyAxis(keep, first, position, rows, key_of[rows], counts)


def per_document(slots: Slots, values: Ints, reduce: np.ufunc) -> Ints:
    """Reduce a value over each document and broadcast the result to each of its slots."""
    if len(values) == 0:
        return values
    starts, inverse = np.unique(slots.start, return_inverse=True)
    reduced: Ints = reduce.reduceat(values, starts)[inverse]
    return reduced
