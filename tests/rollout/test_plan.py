"""The rollout plan against a brute-force reading of docs/semantics.md, Shift and TTT."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.rollout import plan as plan_module
from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks

DOCUMENTS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=7), min_size=1, max_size=4
)  # loss mask per token


def packed(documents, width):
    """The shifted masks and packing metadata of one row of documents."""
    tokens = [flag for document in documents for flag in document]
    loss = torch.zeros(1, width, dtype=torch.long)
    loss[0, : len(tokens) - 1] = torch.tensor(tokens[1:])
    attention = (torch.arange(width) < len(tokens)).long()[None]
    seq_lens = torch.tensor([[len(document) for document in documents]])
    seq_lens[0, -1] += width - len(tokens)
    position, remaining = [], []
    for document in documents:
        position += range(len(document))
        remaining += range(len(document) - 1, -1, -1)
    pad = width - len(tokens)
    position += range(len(documents[-1]), len(documents[-1]) + pad)
    doc_remaining = torch.tensor([remaining + [0] * pad])
    return RowMasks(loss, attention, torch.tensor([position]), seq_lens, doc_remaining)


def expected_elements(documents, num_depths):
    """{(slot, depth): target slot} straight from the rule; slots are counted along the row."""
    elements, begin = {}, 0
    for document in documents:
        for t in range(len(document)):
            for k in range(num_depths):
                if t + 1 + k < len(document) and document[t + 1 + k]:
                    elements[begin + t, k] = begin + t + k
        begin += len(document)
    return elements


def plan_elements(plan):
    """The same mapping, read from a plan's tensors."""
    slots = torch.cat([plan.slot_T[rows.slot_N] for rows in plan.depths])
    elements = {}
    for e, k, m in zip(plan.head.element_N, plan.head.depth_N, plan.head.target_N, strict=True):
        elements[int(slots[e]), int(k)] = int(plan.target_M[m])
    assert len(elements) == len(plan.head)
    return elements


@settings(max_examples=150, deadline=None)
@given(documents=DOCUMENTS, pad=st.integers(0, 3), num_depths=st.integers(1, 5))
def test_elements_follow_the_rule(documents, pad, num_depths):
    width = sum(map(len, documents)) + pad
    plan = plan_rollout(packed(documents, width), num_depths=num_depths)
    expected = expected_elements(documents, num_depths)
    assert plan_elements(plan) == expected
    assert (np.diff(plan.head.target_host) >= 0).all()
    valid = [
        sum(all((t, j) in expected for j in range(k + 1)) for t in range(width))
        for k in range(num_depths)
    ]
    assert plan.step_valid_K.tolist() == valid
    assert plan.supervised_P.sum() == len(expected)


@settings(max_examples=100, deadline=None)
@given(documents=DOCUMENTS, num_depths=st.integers(1, 5))
def test_rows_are_nested_and_as_few_as_possible(documents, num_depths):
    width = sum(map(len, documents)) + 2
    plan = plan_rollout(packed(documents, width), num_depths=num_depths)
    expected = expected_elements(documents, num_depths)
    starts = np.cumsum([0] + [len(d) for d in documents])
    for k, rows in enumerate(plan.depths):
        slots = plan.slot_T[rows.slot_N].tolist()
        assert set(slots) == {t for t, j in expected if j >= k}
        assert torch.equal(rows.slot_N, plan.depths[0].slot_N[: len(rows)])
        assert torch.equal(rows.slot_N[rows.order_N], rows.slot_N.sort().values)
        for slot, first in zip(slots, plan.slot_T[rows.first_N].tolist(), strict=True):
            assert first == max(s for s in starts if s <= slot)
        # the token k later is k entries later on the key axis
        assert plan.slot_T[rows.slot_N + k].tolist() == [slot + k for slot in slots]
    if not expected:
        assert len(plan.slot_T) == 0


@settings(max_examples=60, deadline=None)
@given(
    documents=DOCUMENTS,
    num_depths=st.integers(1, 4),
    limits=st.sampled_from([(1, 1), (3, 8), (4, 1000)]),
)
def test_blocks_cover_every_row_and_every_key_it_sees(documents, num_depths, limits):
    rows_limit, scores_limit = limits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "BLOCK_ROWS", rows_limit)
        patch.setattr(plan_module, "BLOCK_SCORES", scores_limit)
        plan = plan_rollout(packed(documents, sum(map(len, documents))), num_depths=num_depths)
        for rows in (*plan.depths, plan.every):
            covered = [i for b in rows.blocks for i in range(b.row_start, b.row_end)]
            assert covered == list(range(len(rows)))
            for block in rows.blocks:
                index = rows.order_N[block.row_start : block.row_end]
                assert block.key_start == rows.first_N[index].min()
                assert block.key_end == rows.slot_N[index].max() + 1
                size = block.row_end - block.row_start
                assert size <= rows_limit
                assert size == 1 or size * (block.key_end - block.key_start) <= scores_limit


def test_blocks_end_with_documents_where_that_is_cheap():
    documents = [[True] * 40 for _ in range(20)]
    plan = plan_rollout(packed(documents, 800), num_depths=1)
    blocks = plan.depths[0].blocks
    assert len(blocks) == 4  # 39 rows per document: six documents fit into 256 rows
    assert [block.key_end - block.key_start for block in blocks] == [6 * 39, 6 * 39, 6 * 39, 2 * 39]


def test_padded_rows_are_documents_of_their_own():
    loss = torch.tensor([[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    attention = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    plan = plan_rollout(RowMasks(loss, attention), num_depths=2)
    assert plan.slot_T.tolist() == [0, 1, 2, 5]
    assert plan.position_T.tolist() == [0, 1, 2, 0]
    assert plan_elements(plan) == {(0, 1): 1, (1, 0): 1, (1, 1): 2, (2, 0): 2, (5, 0): 5}
    assert plan.counts == (4, 2)
    assert plan.step_valid_K.tolist() == [3, 1]


def test_the_example_of_the_module_docstring():
    plan = plan_rollout(
        RowMasks(torch.tensor([[0, 0, 1, 1, 0, 0]]), torch.ones(1, 6)), num_depths=3
    )
    assert plan.slot_T.tolist() == [0, 1, 2, 3]
    assert plan.depths[0].slot_N.tolist() == [0, 1, 2, 3]
    assert plan.counts == (4, 3, 2)


def test_an_unpadded_slot_is_charged_by_its_mask_only():
    """Callers may pass their own masks: slot T - 1 counts if its mask is set."""
    plan = plan_rollout(RowMasks(torch.ones(1, 3), torch.ones(1, 3)), num_depths=3)
    assert plan.step_valid_K.tolist() == [3, 2, 1]
    assert plan.span == (0, 3)


def same_plan(first, second):
    return first.counts == second.counts and all(
        torch.equal(getattr(first, name), getattr(second, name))
        for name in ("slot_T", "position_T", "target_M", "supervised_P", "step_valid_K")
    )


def test_lengths_and_positions_are_enough():
    """`doc_remaining` follows from them; without lengths, positions add nothing to a padded row."""
    full = packed([[True, True, True], [True, True]], 8)
    full = full._replace(loss_mask=torch.ones(1, 8))  # rollouts must be stopped at document ends
    assert same_plan(
        plan_rollout(full, num_depths=3),
        plan_rollout(full._replace(doc_remaining=None), num_depths=3),
    )
    left = RowMasks(torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 1, 1]]))
    with_positions = left._replace(position_ids=torch.tensor([[7, 7, 0, 1, 2]]))
    assert same_plan(plan_rollout(left, num_depths=3), plan_rollout(with_positions, num_depths=3))


def test_metadata_errors_name_the_field():
    good = packed([[True, True, True], [True, True]], 6)
    with pytest.raises(ValueError, match="seq_lens"):
        plan_rollout(good._replace(seq_lens=torch.tensor([[3, 2]])), num_depths=2)
    with pytest.raises(ValueError, match="position_ids"):
        plan_rollout(good._replace(position_ids=torch.tensor([[0, 1, 2, 3, 5, 6]])), num_depths=2)
    for positions in ([0, 1, 2, 0, 1, 2], [4, 5, 6, 7, 8, 9]):
        alone = RowMasks(torch.ones(1, 6), torch.ones(1, 6), torch.tensor([positions]))
        with pytest.raises(ValueError, match="position_ids"):
            plan_rollout(alone, num_depths=2)
    with pytest.raises(ValueError, match="attention_mask"):
        plan_rollout(RowMasks(torch.ones(1, 4), torch.tensor([[1, 0, 1, 1]])), num_depths=1)
