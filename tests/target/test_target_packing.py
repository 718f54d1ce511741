"""Documents as rows: groups are a cheap partition, and states return to their slots."""

from itertools import combinations

import pytest
import torch
from contract import packed_rows, some_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_model

from fledge.core.rows import TokenBatch
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import Documents, find_documents, group_documents, plan_groups

lengths_lists = st.lists(st.integers(1, 40), min_size=1, max_size=9)


def cost(groups: list[list[int]], lengths: list[int], overhead: int) -> int:
    return sum(overhead + len(g) * max(lengths[i] for i in g) for g in groups)


@given(lengths_lists, st.integers(0, 60), st.integers(1, 200))
def test_groups_partition_the_documents_within_the_limit(
    lengths: list[int], overhead: int, limit: int
) -> None:
    groups = plan_groups(lengths, overhead_tokens=overhead, max_tokens=limit)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    assert all(len(g) == 1 or len(g) * max(lengths[i] for i in g) <= limit for g in groups)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=7), st.integers(0, 60))
@settings(deadline=None, max_examples=50)
def test_no_other_cut_of_the_sorted_documents_is_cheaper(lengths: list[int], overhead: int) -> None:
    groups = plan_groups(lengths, overhead_tokens=overhead, max_tokens=10**6)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    best = min(
        cost(
            [order[a:b] for a, b in zip((0, *cuts), (*cuts, len(order)), strict=True)],
            lengths,
            overhead,
        )
        for size in range(len(order))
        for cuts in combinations(range(1, len(order)), size)
    )
    assert cost(groups, lengths, overhead) == best


@given(lengths_lists, st.integers(0, 60))
def test_take_and_put_are_inverse_on_documents(lengths: list[int], overhead: int) -> None:
    width = sum(lengths) + 3
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    documents = Documents(tuple(starts), tuple(lengths))
    tokens_BT = torch.arange(1, width + 1)[None]
    restored = torch.zeros(1, width, 2)
    plan = plan_groups(lengths, overhead_tokens=overhead, max_tokens=10**6)
    for group in group_documents(documents, plan, device=torch.device("cpu")):
        rows = group.take(tokens_BT)
        assert rows.shape == group.attention_mask_NL.shape
        group.put(torch.stack([rows, -rows], dim=-1).float(), restored)
    real = torch.arange(width) < width - 3
    assert torch.equal(restored[0, :, 0], tokens_BT[0] * real)
    assert torch.equal(restored[0, :, 1], -tokens_BT[0] * real)


def test_the_worked_example() -> None:
    """Width 8, documents of 3 and 2 tokens (docs/semantics.md, Packing)."""
    ids, mask, loss, positions, seq_lens, remaining = packed_rows([[[11, 12, 13], [14, 15]]], 8)
    assert positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]]
    assert mask.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert seq_lens.tolist() == [[3, 5]]
    assert remaining.tolist() == [[2, 1, 0, 1, 0, 0, 0, 0]]
    documents = find_documents(TokenBatch(ids, mask, loss, positions, seq_lens, remaining))
    assert documents == Documents((0, 3), (3, 2))
    zeroed = positions * mask  # positions of padding do not matter
    without_padding = TokenBatch(ids, mask, loss, zeroed, seq_lens, remaining)
    assert find_documents(without_padding) == documents
    plan = plan_groups(documents.lengths, overhead_tokens=100, max_tokens=8)
    (group,) = group_documents(documents, plan, device=torch.device("cpu"))
    assert group.take(ids).tolist() == [[11, 12, 13], [14, 15, 15]]
    assert group.slots.tolist() == [0, 1, 2, 3, 4]
    assert group.cells.tolist() == [0, 1, 2, 3, 4]


def test_a_row_of_padding_only_has_no_document() -> None:
    ids, mask, loss, positions, seq_lens, remaining = packed_rows([[[5, 6, 7]], [[8, 9]]], 4)
    mask[1] = 0
    documents = find_documents(TokenBatch(ids, mask, loss, positions, seq_lens, remaining))
    assert documents == Documents((0,), (3,))
    target = HFEagle3TargetModel(tiny_model("llama"))
    batch = target.generate_batch(ids, mask, loss * mask, positions, seq_lens, remaining)
    assert not batch.aux_hidden_states[1].any()
    with pytest.raises(ValueError, match="no token"):
        target.generate_batch(ids, mask * 0, loss * 0, positions, seq_lens, remaining)


@pytest.mark.parametrize("overhead", [0, 5, 10**6])
def test_grouping_does_not_change_the_answer(overhead: int) -> None:
    target = HFEagle3TargetModel(tiny_model("mistral", dtype=torch.float64))
    rows = packed_rows(some_documents(), 14)
    expected = target.generate_batch(*rows)
    target.overhead_tokens = overhead
    batch = target.generate_batch(*rows)
    torch.testing.assert_close(batch.logits, expected.logits, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        batch.aux_hidden_states, expected.aux_hidden_states, rtol=1e-10, atol=1e-10
    )
