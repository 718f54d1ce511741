"""The host side of planning: the slots of a batch on one flat axis, the key axis, and the draws of
rollouts.

`plan.py` explains the purpose of the two axes; `context.py` splits the key axis between ranks.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fledge.core.rows import TokenBatch, check_packing

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]


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
    def documents(self) -> "Documents":
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
    check_packing(*packing)
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
    starts, document = np.unique(slots.start, return_inverse=True)
    started = np.where(last_S >= 0, index, -1)
    last_anchor = np.maximum.reduceat(started, starts)[document] if len(index) else index
    keep = np.flatnonzero(index <= last_anchor)
    if not slots.real[keep].all():
        raise ValueError("attention_mask: padding lies inside a document, not at a row's ends")
    key_of = np.cumsum(index <= last_anchor) - 1  # slot -> key axis
    anchors = np.flatnonzero(last_S >= 0)
    rows = anchors[np.lexsort((anchors, -last_S[anchors]))]
    counts = tuple(int((last_S >= k).sum()) for k in range(num_depths))
    first, position = key_of[slots.start[keep]], slots.position[keep]
    return KeyAxis(keep, first, position, rows, key_of[rows], counts)


def supervised_pairs(slots: Slots, num_depths: int) -> Bools:
    """[S, K]: whether the rollout of slot t has something to predict at depth k."""
    size = len(slots.start)
    supervised = np.zeros((size, num_depths), dtype=np.bool_)
    for k in range(min(num_depths, size)):
        supervised[: size - k, k] = slots.target[k:] & (k < slots.reach[: size - k])
    return supervised


def last_depths(supervised_SK: Bools) -> Ints:
    """[S] the deepest depth that each slot's rollout has to reach, -1 where it need not start."""
    from_end = np.argmax(supervised_SK[:, ::-1], axis=1)
    return np.where(supervised_SK.any(axis=1), supervised_SK.shape[1] - 1 - from_end, -1)


def slots_asked_for(supervised_SK: Bools) -> Bools:
    """[S]: whether some rollout needs the target's answer here."""
    count, depths = supervised_SK.shape
    asked = np.zeros(count, dtype=np.bool_)
    for k in range(min(depths, count)):
        asked[k:] |= supervised_SK[: count - k, k]
    return asked


def supervised_so_far(supervised_SK: Bools) -> Ints:
    """[K] number of slots that are supervised at all depths <= k."""
    counts, alive_S = [], np.ones(len(supervised_SK), dtype=np.bool_)
    for supervised_S in supervised_SK.T:
        alive_S = alive_S & supervised_S
        counts.append(np.count_nonzero(alive_S))
    return np.array(counts, dtype=np.int64)


# --- padded plans: see `rollout/plan.py` ----------------------------------------------------------


def rounded(size: int, quantum: int) -> int:
    return -(-max(1, size) // quantum) * quantum


def filled(values: Ints, size: int, with_: int) -> Ints:
    result = np.full(size, with_, dtype=np.int64)
    result[: len(values)] = values
    return result


def pairs_with_targets(supervised_SK: Bools, axis: KeyAxis, targets: Ints) -> tuple[Ints, Bools]:
    """For each target slot and depth, the element that asks for it (the last row's, which is
    padding, if none does), and whether one does; as many target slots as rows."""
    size, depth = axis.counts[0], np.arange(len(axis.counts))
    anchor_MK = targets[:, None] - depth
    asked_MK = supervised_SK[np.maximum(anchor_MK, 0), depth] & (anchor_MK >= 0)
    row_S = np.full(len(supervised_SK), size - 1, dtype=np.int64)
    rows = np.flatnonzero(supervised_SK.any(axis=1))
    row_S[axis.row_slot[: len(rows)]] = np.arange(len(rows))
    row_MK = np.full((size, len(depth)), size - 1, dtype=np.int64)
    real_MK = np.zeros(row_MK.shape, dtype=np.bool_)
    row_MK[: len(targets)] = np.where(asked_MK, row_S[anchor_MK], size - 1)
    real_MK[: len(targets)] = asked_MK
    return (depth * size + row_MK).reshape(-1), real_MK.reshape(-1)


def spread_evenly(asked_P: Ints, real_P: Bools) -> tuple[Ints, Bools]:
    """The elements, real ones sorted by the slot that they ask for, and which of them are real. The
    others are spread evenly between them, so that every group has equally many."""
    ordered, others = np.flatnonzero(real_P), np.flatnonzero(~real_P)
    ordered = ordered[np.argsort(asked_P[ordered], kind="stable")]
    real = np.zeros_like(real_P)
    real[np.arange(len(ordered)) * len(real) // max(1, len(ordered))] = True
    element = np.empty(len(real), dtype=np.int64)
    element[real], element[~real] = ordered, others
    return element, real


def targets_by_group(
    asked_X: Ints, real_X: Bools, group: int, *, step: int
) -> tuple[Ints, Ints, int]:
    """The target slots of all groups end to end, each element's index among them (any of its group
    if it is not real), and the number of slots per group, a multiple of `step`."""
    group_X = np.arange(len(asked_X)) // group
    width = int(asked_X.max()) + 1
    unique, inverse = np.unique((group_X * width + asked_X)[real_X], return_inverse=True)
    owner, slot = np.divmod(unique, width)
    rank = np.arange(len(unique)) - np.searchsorted(owner, owner)
    spread = rounded(int(rank.max(initial=-1)) + 1, step)
    target = np.zeros(-(-len(asked_X) // group) * spread, dtype=np.int64)
    target[owner * spread + rank] = slot
    target_X = group_X * spread
    target_X[real_X] = (owner * spread + rank)[inverse]
    return target, target_X, spread


# --- draws ----------------------------------------------------------------------------------------
# Which rollouts are followed, and how deep: P-EAGLE's COD sampling (docs/semantics.md,
# P-EAGLE) and the plain thinning of EAGLE-3 (`objective.depth_keep`).
#
# Depth 0 is every position. Deeper depths are thinned: of a document with n supervised positions,
# int((n - d) * max(ratio^d, ratio_min)) elements are kept at depth d, a uniform sample of those
# whose rollout was kept at depth d - 1 and continues; all of them if there are fewer. Rollouts are
# nested, so the whole draw is one number per anchor: the deepest depth to which its rollout is
# followed.
#
# Example: six positions, all supervised, 3 depths, ratio 0.7: 6, int(5 * 0.7) = 3, int(4 * 0.49) =
# 1.
#
#     position p            0   1   2   3   4   5
#     depth 1 keeps p =         1       3       5      anchors p - 1 = 0, 2, 4
#     depth 2 keeps p =                 .   4          from the pool {2, 4} (6 is outside): anchor 2
#     deepest per anchor    1   .   2   .   1   .
#
# The draw of a document is a function of the seed and of its own loss mask, and of nothing else:
# padding, packing, order, micro-batches and ranks do not change what is sampled from it. (Two
# documents with the same mask get the same sample; the next step's seed resamples both.)


def generate_cod_sample_indices(
    seq_length: int,
    loss_mask: Tensor,  # [seq_length] or [1, seq_length], shifted
    num_depths: int = 8,
    down_sample_ratio: float = 0.7,
    down_sample_ratio_min: float = 0.2,
    *,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """One document's elements as (anchor_pos, depth): depth 0 first, anchors ascending per depth.

    An element's position is anchor_pos + depth; at depths >= 1 it is supervised.
    """
    check_cod_options(num_depths, down_sample_ratio, down_sample_ratio_min)
    if loss_mask.squeeze().ndim > 1:  # several rows would be read as one document
        raise ValueError(f"loss_mask: one row at a time, got {list(loss_mask.shape)}")
    mask = loss_mask.reshape(-1)
    if seq_length < 0 or len(mask) < seq_length:
        raise ValueError(f"loss_mask: {len(mask)} positions for seq_length {seq_length}")
    supervised = (mask[:seq_length] != 0).cpu().numpy()
    place = np.arange(seq_length, dtype=np.int64)
    deepest = sample_depths(
        Documents(supervised, np.zeros_like(place), place),
        num_depths=num_depths,
        ratio=down_sample_ratio,
        ratio_min=down_sample_ratio_min,
        seed=draw_seed(generator),
    )
    anchors = [place]
    anchors += [np.flatnonzero(deepest >= d) for d in range(1, num_depths)]
    depths = [np.full(len(anchor), d, dtype=np.int64) for d, anchor in enumerate(anchors)]
    anchor_pos, depth = (torch.from_numpy(np.concatenate(parts)) for parts in (anchors, depths))
    return anchor_pos.to(loss_mask.device), depth.to(loss_mask.device)


def check_counts(**counts: object) -> None:
    """Refuse what is not a positive int."""
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name}: must be a positive int, got {value!r}")


def check_cod_options(num_depths: int, ratio: float, ratio_min: float) -> None:
    check_counts(num_depths=num_depths)
    if not 0 < ratio <= 1:
        raise ValueError(f"down_sample_ratio: must be in (0, 1], got {ratio!r}")
    if not 0 <= ratio_min <= 1:
        raise ValueError(f"down_sample_ratio_min: must be in [0, 1], got {ratio_min!r}")


def draw_seed(generator: torch.Generator | None = None) -> int:
    """One number from the generator (torch's default if None), the seed of a whole draw."""
    device = torch.device("cpu") if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


class Documents(NamedTuple):
    """The slots of a batch, [slots] each."""

    supervised: Bools
    ordinal: Ints  # which document the slot belongs to, ascending
    place: Ints  # position in the document


def sample_depths(
    documents: Documents,
    *,
    num_depths: int,
    ratio: float,
    ratio_min: float,
    seed: int,
) -> Ints:
    """[slots] the deepest depth of each anchor's rollout, 0 where it stays at depth 0."""
    supervised, document, place = documents
    deepest = np.zeros(len(supervised), dtype=np.int64)
    continues = np.zeros_like(supervised)  # the next position is supervised, in the same document
    continues[:-1] = supervised[1:] & (document[1:] == document[:-1])
    key = _keys(supervised, document, place)
    valid_count = np.bincount(document[supervised], minlength=_documents(document))
    pool = np.flatnonzero(supervised & (place > 0))
    shares = kept_shares(num_depths, ratio, ratio_min)
    for depth in range(1, num_depths):
        size = (np.maximum(0, valid_count - depth) * shares[depth]).astype(np.int64)
        noise = _noise(seed, depth, key[pool], place[pool])
        kept = pool[rank_in_group(document[pool], noise) < size[document[pool]]]
        deepest[kept - depth] = depth
        pool = kept[continues[kept]] + 1
    return deepest


def kept_shares(num_depths: int, ratio: float, ratio_min: float) -> tuple[float, ...]:
    """[K] the largest share of the supervised positions that is sampled at each depth."""
    return tuple(max(ratio**depth, ratio_min) if depth else 1.0 for depth in range(num_depths))


def surviving_depths(documents: Documents, *, num_depths: int, keep: float, seed: int) -> Ints:
    """[slots] the deepest depth of each anchor's rollout when it survives every step deeper with
    probability `keep`, independently: depth k is reached with probability keep^k, always after the
    depths before it."""
    word = slot_words(documents, seed)
    chance = (word.astype(np.float64) + 1) / 2.0**64  # (0, 1]
    deepest: Ints = np.minimum(np.log(chance) / np.log(keep), num_depths - 1).astype(np.int64)
    return deepest


def slot_words(documents: Documents, seed: int) -> Words:
    """[slots] a random word for each place of each document: the seed of a draw per slot."""
    return _noise(seed, 0, _keys(*documents), documents.place)


def _documents(document: Ints) -> int:
    """How many documents there are, from their ascending ordinals."""
    return int(document[-1]) + 1 if len(document) else 0


def rank_in_group(group: Ints, noise: Words) -> Ints:
    """The rank of each member in its group, by ascending noise."""
    order = np.lexsort((noise, group))
    ordered = group[order]
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return rank


# --- random words: splitmix64's finalizer, once per coordinate ------------------------------------


def _keys(supervised: Bools, document: Ints, place: Ints) -> Words:
    """[slots] a hash of the slot's document: the sum of one word per supervised position."""
    words = np.where(supervised, _mix(place.astype(np.uint64) * _GOLDEN + _GOLDEN), np.uint64(0))
    sums = np.zeros(_documents(document), dtype=np.uint64)
    np.add.at(sums, document, words)
    return sums[document]


def _noise(seed: int, depth: int, key: Words, place: Ints) -> Words:
    """A random word for each place of each document."""
    word = np.full(len(place), seed % 2**64, dtype=np.uint64)
    for coordinate in (np.full_like(key, depth), key, place.astype(np.uint64)):
        word = _mix((word ^ coordinate) + _GOLDEN)
    return word


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(word: Words) -> Words:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))
