"""Packing properties, and the worked example of the batch layout."""

import tracemalloc
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.errors import BadInput
from fledge.core.rows import TokenRow
from fledge.data import pack as pack_module
from fledge.data.pack import Piece, collate, one_per_row, pack_rows, pad_rows

lengths = st.lists(st.integers(0, 40), max_size=60)


def rows_of(sizes):
    rng = np.random.default_rng(0)
    return [
        TokenRow(
            np.arange(1, n + 1, dtype=np.int32) + 100 * i,
            rng.integers(0, 2, n).astype(np.uint8),
            f"row{i}",
            False,
        )
        for i, n in enumerate(sizes)
    ]


def defined_packs(sizes, budget, *, seed, epoch, window):
    """The reference definition, which must never change: resumed runs rely on the same packs."""
    rng, packs = np.random.default_rng([seed, epoch]), []
    order = rng.permutation(len(sizes)).tolist()
    for begin in range(0, len(order), window):
        pieces, opened = [], []
        for row in order[begin : begin + window]:
            if sizes[row]:
                pieces.append(Piece(row, min(budget, sizes[row])))
        for piece in sorted(pieces, key=len, reverse=True):
            spaces = [(budget - sum(map(len, p)), at) for at, p in enumerate(opened)]
            fits = min((space for space in spaces if space[0] >= len(piece)), default=None)
            if fits is None:
                opened.append([piece])
            else:
                opened[fits[1]].append(piece)
        packs += map(tuple, opened)
    return [packs[i] for i in rng.permutation(len(packs))]


@settings(deadline=None)
@given(
    sizes=lengths,
    budget=st.integers(1, 50),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
    window=st.sampled_from([1, 7, 16, 64]),
)
def test_packs_equal_the_reference_definition(sizes, budget, seed, epoch, window):
    options = {"seed": seed, "epoch": epoch}
    with patch.object(pack_module, "WINDOW", window):
        packing = pack_rows(sizes, budget, **options)
    defined = defined_packs(sizes, budget, **options, window=window)
    assert list(packing.packs) == defined
    assert packing.packs[1:-1] == tuple(defined[1:-1])
    assert packing.cut == sum(n > budget for n in sizes)
    used = sum(len(piece) for packed in defined for piece in packed)
    assert packing.padding_share == (1 - used / (len(defined) * budget) if defined else 0.0)


@given(sizes=lengths, width=st.integers(1, 50), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_padded_epochs_are_shuffled_with_one_document_per_row(sizes, width, seed, epoch):
    packing = pad_rows(np.array(sizes, dtype=np.int64), width, seed=seed, epoch=epoch)
    order = np.random.default_rng([seed, epoch]).permutation(len(sizes))
    defined = one_per_row(sizes, width)
    assert list(packing.packs) == [defined[i] for i in order]


def test_an_epoch_takes_few_bytes_per_row():
    """For millions of rows: at most 12 bytes per row afterwards and 100 while packing."""
    sizes = np.random.default_rng(0).integers(16, 512, 100_000)
    tracemalloc.start()
    packing = pack_rows(sizes, 4096)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 12 * len(sizes)
    assert peak < 100 * len(sizes)
    assert packing.padding_share < 0.002


def test_a_pack_has_room_for_a_token():
    with pytest.raises(BadInput, match="holds nothing"):
        pack_rows([3, 4], 0)


def test_worked_example_of_a_batch():
    rows = rows_of([3, 2])
    batch = collate(rows, [(Piece(0, 3), Piece(1, 2))], 8, pad_id=0)
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch.seq_lens.tolist() == [[3, 5]]
    assert batch.doc_remaining.tolist() == [[2, 1, 0, 1, 0, 0, 0, 0]]
    assert batch.input_ids.tolist() == [[1, 2, 3, 101, 102, 0, 0, 0]]
    assert batch.places == (("row0", "row1"),)


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=20),
    budget=st.integers(20, 50),
    padded=st.booleans(),
)
def test_batches_hold_every_document_whole(sizes, budget, padded):
    """Of packs, or of one document per row."""
    rows = rows_of(sizes)
    packs = one_per_row(sizes, budget) if padded else pack_rows(sizes, budget).packs
    batch = collate(rows, packs, budget, pad_id=7)
    assert (batch.seq_lens.sum(1) == budget).all()
    for b, pack in enumerate(packs):
        assert len(pack) == 1 or not padded
        *before, _ = map(len, pack)
        places = [n for length in (*before, budget - sum(before)) for n in range(length)]
        assert batch.position_ids[b].tolist() == places  # padding continues the last document
        assert batch.seq_lens[b][: len(pack)].tolist() == [*before, budget - sum(before)]
        at = 0
        for piece in pack:
            row, end = rows[piece.row], at + len(piece)
            assert batch.input_ids[b, at:end].tolist() == row.input_ids.tolist()
            assert batch.loss_mask[b, at:end].tolist() == row.loss_mask.tolist()
            assert batch.doc_remaining[b, at:end].tolist() == list(range(len(piece)))[::-1]
            at = end
        assert batch.attention_mask[b].tolist() == [1] * at + [0] * (budget - at)
        for field in (batch.loss_mask, batch.doc_remaining):
            assert not field[b, at:].any()
        assert (batch.input_ids[b, at:] == 7).all()
