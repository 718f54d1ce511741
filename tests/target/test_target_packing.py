"""Documents as rows: groups are a cheap partition, and states return to their slots."""

from itertools import combinations
from typing import Any

import pytest
import torch
from contract import packed_rows, some_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, tiny_model

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


ONE_ROW = [name for name in ARCHITECTURES if name not in ("gemma2", "gpt-oss")]


def in_one_row(model: Any, supervision: Any = "hidden") -> HFEagle3TargetModel:
    """A target that runs documents in one row wherever it can, as on a GPU."""
    target = HFEagle3TargetModel(model, supervision=supervision)
    target.try_one_row, target.overhead_tokens = True, 1000
    return target


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_row_equals_documents_as_rows(architecture: str) -> None:
    model = tiny_model(architecture, dtype=torch.float64)
    implementation = model.config._attn_implementation
    rows = packed_rows(some_documents(), 14)
    target = in_one_row(model)
    batch = target.generate_batch(*rows)
    assert target._one_row_checked == (architecture in ONE_ROW)
    assert model.config._attn_implementation == implementation
    expected = HFEagle3TargetModel(model, supervision="hidden").generate_batch(*rows)
    for actual, wanted in zip(batch.tensors(), expected.tensors(), strict=True):
        torch.testing.assert_close(actual[1], wanted[1], rtol=1e-10, atol=1e-10)


def test_one_row_runs_once_and_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    target = in_one_row(tiny_model("qwen3"))
    target.generate_batch(*packed_rows(some_documents(), 14))
    shapes: list[torch.Size] = []
    plain = target._call

    def recording(ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        shapes.append(ids.shape)
        return plain(ids, *rest, **options)

    monkeypatch.setattr(target, "_call", recording)
    target.generate_batch(*packed_rows(some_documents(), 14))
    assert shapes == [(1, 33)]  # 3 + 2 + 6 + 12 + 5 + 1 + 4 tokens
    shapes.clear()
    equal = [[[5] * 7, [6] * 7], [[7] * 7, [8] * 7]]
    target.generate_batch(*packed_rows(equal, 14))
    assert shapes == [(4, 7)], "documents of one length need no regrouping"


def test_one_row_is_refused_when_states_cross_documents() -> None:
    """A layer that reads its neighbor in the row is detected by comparison, not by its name."""
    model = tiny_model("llama")
    mlp = model.model.layers[2].mlp
    plain = mlp.forward
    mlp.forward = lambda x: plain(
        x + torch.roll(x, 1, dims=1) * (torch.arange(x.shape[1]) > 0)[:, None]
    )
    target = in_one_row(model)
    batch = target.generate_batch(*packed_rows(some_documents(), 14))
    assert target._one_row_checked is False
    expected = HFEagle3TargetModel(model, supervision="hidden").generate_batch(
        *packed_rows(some_documents(), 14)
    )
    torch.testing.assert_close(batch.aux_hidden_states, expected.aux_hidden_states)


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError, KeyError, AttributeError])
def test_one_row_is_abandoned_whatever_error_the_model_raises(error: type[Exception]) -> None:
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    plain = rotary.forward

    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        if (position_ids.diff() < 0).any():
            raise error("positions that begin again")
        return plain(x, position_ids)

    rotary.forward = forward
    target, rows = in_one_row(model), packed_rows(some_documents(), 14)
    batch = target.generate_batch(*rows)
    assert target._one_row_checked is False
    expected = HFEagle3TargetModel(model, supervision="hidden").generate_batch(*rows)
    torch.testing.assert_close(batch.aux_hidden_states, expected.aux_hidden_states)


def test_chunked_attention_is_not_tried_in_one_row() -> None:
    model = tiny_model("llama")
    model.config.attention_chunk_size = 8192
    target = in_one_row(model)
    target.generate_batch(*packed_rows(some_documents(), 14))
    assert target._one_row_checked is False
