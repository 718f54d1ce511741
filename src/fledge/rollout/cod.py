"""Which rollouts are followed, and how deep: P-EAGLE's COD sampling (docs/semantics.md,
P-EAGLE) and, at the end of the file, the plain thinning of EAGLE-3 (`objective.depth_keep`).

Depth 0 is every position. Deeper depths are thinned: of a document with n supervised positions,
int((n - d) * max(ratio^d, ratio_min)) elements are kept at depth d, a uniform sample of those whose
rollout was kept at depth d - 1 and continues; all of them if there are fewer. Rollouts are nested,
so the whole draw is one number per anchor: the deepest depth to which its rollout is followed.

Example: six positions, all supervised, 3 depths, ratio 0.7: 6, int(5 * 0.7) = 3, int(4 * 0.49) = 1.

    position p            0   1   2   3   4   5
    depth 1 keeps p =         1       3       5      anchors p - 1 = 0, 2, 4
    depth 2 keeps p =                 .   4          from the pool {2, 4} (6 is outside): anchor 2
    deepest per anchor    1   .   2   .   1   .

The draw of a document is a function of the seed and of its own loss mask, and of nothing else:
padding, packing, order, micro-batches and ranks do not change what is sampled from it. (Two
documents with the same mask get the same sample; the next step's seed resamples both.)
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.uint64]


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


def check_cod_options(num_depths: int, ratio: float, ratio_min: float) -> None:
    if isinstance(num_depths, bool) or not isinstance(num_depths, int) or num_depths < 1:
        raise ValueError(f"num_depths: must be a positive int, got {num_depths!r}")
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
    row: Ints | None = None,  # [slots] the pack that `max_anchors` is counted in
    max_anchors: int | None = None,
) -> Ints:
    """[slots] the deepest depth of each anchor's rollout, 0 where it stays at depth 0.

    `max_anchors` caps the rollouts of a row; deeper depths are thinned further only once their
    documents' sizes fall below what the cap left.
    """
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
        kept = pool[_rank(document[pool], noise) < size[document[pool]]]
        if depth == 1 and max_anchors is not None and row is not None:
            noise = _noise(seed, depth, key[kept], place[kept])
            kept = kept[_rank(row[kept], noise) < max_anchors]
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


def _rank(group: Ints, noise: Words) -> Ints:
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
