"""Token batches: validation, moving between devices, and the shift by one slot."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch, shift_left

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
MASK = (IDS != 0).long()
POSITIONS = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
LENGTHS = torch.tensor([[4], [4]])
REMAINING = torch.tensor([[3, 2, 1, 0], [1, 0, 0, 0]])


def packed(**changes):
    trio = {"position_ids": POSITIONS, "seq_lens": LENGTHS, "doc_remaining": REMAINING}
    return TokenBatch(IDS, MASK, MASK, **{**trio, **changes})


@pytest.mark.parametrize(
    ("message", "make"),
    {
        r"input_ids must be \[B, T\]": lambda: TokenBatch(IDS[0], MASK[0], MASK[0]),
        "input_ids must hold integers": lambda: TokenBatch(IDS.float(), MASK, MASK),
        "input_ids must be a tensor, got list": lambda: TokenBatch(IDS.tolist(), MASK, MASK),
        "input_ids must be .* not empty": lambda: TokenBatch(IDS[:0], MASK[:0], MASK[:0]),
        r"attention_mask must be \[2, 4\]": lambda: TokenBatch(IDS, MASK[:, 1:], MASK),
        r"loss_mask must be \[2, 4\], got \[1, 4\]": lambda: TokenBatch(IDS, MASK, MASK[:1]),
        "seq_lens missing: a packed batch needs": lambda: packed(seq_lens=None),
        "position_ids missing: a packed batch needs": lambda: packed(position_ids=None),
        "position_ids must hold integers": lambda: packed(position_ids=POSITIONS.float()),
        r"doc_remaining must be \[2, 4\]": lambda: packed(doc_remaining=REMAINING[:, 1:]),
        r"seq_lens must be \[2, max_docs\]": lambda: packed(seq_lens=LENGTHS[:1]),
        "sum to the width 4 .* wrong in row 1": lambda: packed(seq_lens=torch.tensor([[4], [3]])),
        "wrong in row 0": lambda: packed(seq_lens=torch.tensor([[5, -1], [4, 0]])),
    }.items(),
)
def test_construction_errors_name_the_invalid_field(message, make):
    with pytest.raises(ValueError, match=message):
        make()


def test_padded_rows_have_no_packing_and_packed_rows_have_all_fields():
    assert TokenBatch(IDS, MASK, MASK).packing is None
    assert packed().packing == (POSITIONS, LENGTHS, REMAINING)
    assert packed().arguments() == (IDS, MASK, MASK, POSITIONS, LENGTHS, REMAINING)
    assert (packed().shape, packed().tokens) == ((2, 4), 8)


DOCUMENTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=100, deadline=None)
@given(lengths=DOCUMENTS, pad=st.integers(0, 3))
def test_doc_remaining_follows_from_lengths_and_padding(lengths, pad):
    """For each slot, the number of real tokens after it in its document."""
    width = max(map(sum, lengths)) + pad
    docs = max(map(len, lengths))
    positions, sizes, masks, expected = [], [], [], []
    for row in lengths:
        left = width - sum(row)
        sizes.append([*row[:-1], row[-1] + left, *[0] * (docs - len(row))])
        positions.append([p for n in sizes[-1] for p in range(n)])
        masks.append([1] * sum(row) + [0] * left)
        expected.append([n - 1 - p for n in row for p in range(n)] + [0] * left)
    ids, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.tensor(masks)
    trio = {"position_ids": torch.tensor(positions), "seq_lens": torch.tensor(sizes)}
    assert TokenBatch(ids, mask, mask, **trio).doc_remaining.tolist() == expected
    states = {
        "aux_hidden_states": torch.zeros(*mask.shape, 3),
        "logits": torch.zeros(*mask.shape, 2),
    }
    batch = Eagle3TargetBatch(input_ids=ids, attention_mask=mask, loss_mask=mask, **states, **trio)
    assert batch.doc_remaining.tolist() == expected
    assert batch.to_trainer_inputs()["doc_remaining"] is batch.doc_remaining


@pytest.mark.parametrize(
    ("mask", "positions", "good"),
    [
        ([1, 1, 1, 0], [0, 1, 2, 3], True),
        ([1, 1, 1, 0], [0, 1, 2, 9], True),  # positions of padding are ignored
        ([0, 1, 1, 1], [0, 0, 1, 2], True),
        ([0, 1, 1, 1], [0, 1, 2, 3], False),  # counts the padding too
        ([1, 1, 1, 1], [0, 1, 0, 1], False),  # two documents without their lengths
        ([1, 1, 1, 1], [5, 6, 7, 8], False),
    ],
)
def test_positions_without_lengths_must_count_the_tokens_of_a_row(mask, positions, good):
    mask, positions = (torch.tensor([[1, 1, 1, 1], x]) for x in (mask, positions))
    positions[0] = torch.arange(4)
    if good:
        rows = TokenBatch(mask, mask, mask, positions)
        assert rows.arguments()[3:] == (positions, None, None)
        assert rows.packing is None
    else:
        with pytest.raises(ValueError, match=r"without seq_lens .*0 \.\. n - 1.* wrong in row 1$"):
            TokenBatch(mask, mask, mask, positions)


def test_rows_already_on_the_device_are_not_copied():
    rows = TokenBatch(IDS, MASK, MASK, places=(("a",), ("b",)))
    assert rows.to(torch.device("cpu")) is rows
    wide = rows.map(lambda tensor: tensor.int())
    assert wide.loss_mask.dtype == torch.int32
    assert wide.places == rows.places


def test_shift_left_moves_one_slot_and_leaves_zeros():
    assert shift_left(IDS).tolist() == [[6, 7, 8, 0], [10, 0, 0, 0]]


@pytest.mark.parametrize("rows", [TokenBatch(IDS, MASK, MASK), packed()], ids=["padded", "packed"])
def test_a_target_answer_is_shifted_once(rows):
    aux, hidden = torch.randn(2, 4, 6), torch.randn(2, 4, 2)
    states = {"aux_hidden_states": aux, "last_hidden_states": hidden}
    batch = Eagle3TargetBatch.about(rows, **states)
    assert torch.equal(batch.last_hidden_states, shift_left(hidden))
    assert batch.aux_hidden_states is aux
    assert torch.equal(batch.input_ids, shift_left(IDS))
    assert torch.equal(batch.loss_mask, shift_left(MASK))
    assert batch.attention_mask is MASK
    assert (batch.position_ids, batch.seq_lens, batch.doc_remaining) == rows.arguments()[3:]
    kept = {**states, "last_hidden_states": batch.last_hidden_states}
    again = Eagle3TargetBatch.about(rows, **kept, shifted=True)
    assert again.last_hidden_states is batch.last_hidden_states
    assert torch.equal(again.input_ids, batch.input_ids)


@pytest.mark.parametrize(
    "supervision",
    [
        {"logits": torch.randn(2, 4, 9)},
        {"target_probs": torch.rand(2, 4, 3), "position_mask": torch.ones(2, 4, 1)},
    ],
)
def test_every_supervision_is_shifted_with_its_rows(supervision):
    rows, aux = TokenBatch(IDS, MASK, MASK), torch.randn(2, 4, 6)
    batch = Eagle3TargetBatch.about(rows, aux_hidden_states=aux, **supervision)
    for name, tensor in supervision.items():
        assert torch.equal(getattr(batch, name), shift_left(tensor))


def test_tokenizing_does_not_import_torch():
    code = "import fledge.data.pack, fledge.data.tokenise, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
