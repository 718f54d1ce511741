"""Rounding the number of blocks up changes nothing: loss, metrics and every gradient."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fledge.methods.block import plan as even_blocks
from fledge.methods.block.objective import DSparkTrainerModule
from fledge.methods.block.plan import plan_blocks
from fledge.methods.losses.lk_lambda import LkLambda
from objective.naive_block import (
    Table,
    make_block_documents,
    make_block_draft,
    make_spark_draft,
)
from objective.naive_eagle3 import V, masks_of, packed_batch, padded_batch
from objective.test_block import LENGTHS, SEED, VARIANTS, assert_same, backward, make_module, run

KINDS = {
    "text": {},
    "dpace": {"weights": "dpace"},
    "tv": {"loss": "tv"},
    "kl": {"loss": "kl"},
    "hard": {"loss": "hard"},
    "lk_lambda": {"loss": LkLambda(scale=0.9, decay=1.5)},
    "dspark": {"kind": DSparkTrainerModule},
    "dspark, text alone": {
        "kind": DSparkTrainerModule,
        "distance_weight": 0.0,
        "confidence_weight": 0.0,
    },
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Small groups, so that there are several of them."""
    monkeypatch.setattr(even_blocks, "GROUP", 4)
    monkeypatch.setattr(even_blocks, "SHARES", 2)


def run_with_zero_grads(module, batch, **extra):
    """Returns (output, gradients), with zeros for parameters that the loss does not use."""
    out = module(**batch, seed=SEED, **extra)
    module.zero_grad()
    out.loss.backward()
    named = module.draft_model.named_parameters()
    zero = torch.zeros_like
    return out, {name: zero(p) if p.grad is None else p.grad.clone() for name, p in named}


def run_evenly(module, batch, quantum):
    module.quantum = quantum
    result = run_with_zero_grads(module, batch)
    module.quantum = 0
    return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["fast", "reference"])
def test_round_sizes_change_nothing(kind, attention):
    module = make_module(**KINDS[kind], attention=attention)
    documents = make_block_documents(LENGTHS)
    for batch in (packed_batch([documents], 60), padded_batch(documents)):
        expected = run_with_zero_grads(module, batch)
        assert expected[0].loss > 0
        for quantum in (1, 16, 100):
            assert_same(expected, run_evenly(module, batch, quantum))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["text", "kl", "dspark"])
def test_round_sizes_change_nothing_for_any_draft(variant, kind):
    make = make_spark_draft if kind == "dspark" else make_block_draft
    module = make_module(make(**VARIANTS[variant]), **KINDS[kind])
    batch = packed_batch([make_block_documents(LENGTHS)], 57)
    expected = run_with_zero_grads(module, batch)
    for quantum in (1, 7, 32):
        assert_same(expected, run_evenly(module, batch, quantum))


@pytest.mark.parametrize("kind", ["text", "dpace", "kl", "dspark"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 12, 100])
def test_round_sizes_change_nothing_for_any_chunk_size(kind, chunk_rows):
    """Chunks smaller than, equal to and larger than a group of 4 blocks of 3 depths (DSpark: 4)."""
    batch = packed_batch([make_block_documents(LENGTHS)], 60)
    expected = run_with_zero_grads(make_module(**KINDS[kind]), batch)
    module = make_module(**KINDS[kind], chunk_rows=chunk_rows)
    assert_same(expected, run_evenly(module, batch, 8))


@pytest.mark.parametrize("kind", ["text", "dpace", "kl"])
def test_round_sizes_change_nothing_with_a_reduced_vocabulary(kind):
    ids = torch.arange(0, V, 2)
    draft = make_block_draft(draft_vocab_size=len(ids))
    draft.set_vocab_mapping(ids)
    draft.copy_head_from_target(Table(V, torch.float64))
    module = make_module(draft, **KINDS[kind])
    batch = padded_batch(make_block_documents([30, 25], supervised=1.1))
    assert_same(run_with_zero_grads(module, batch), run_evenly(module, batch, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_supervision_gives_zeros(kind):
    module = make_module(**KINDS[kind])
    for documents in (make_block_documents(LENGTHS, supervised=-1), make_block_documents([1])):
        out, grads = run_evenly(module, padded_batch(documents), 8)
        assert out.loss == 0
        assert all(bool((grad == 0).all()) for grad in grads.values())
        assert sum(int(getattr(out, field.name).abs().sum()) for field in fields(out)) == 0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.1]),
    quantum=st.integers(1, 20),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 999),
)
def test_round_sizes_change_nothing_for_any_documents(
    lengths, pad, supervised, quantum, kind, seed
):
    module = make_module(**KINDS[kind])
    documents = make_block_documents(lengths, seed=seed, supervised=supervised)
    batch = packed_batch([documents], sum(lengths) + pad)
    assert_same(run_with_zero_grads(module, batch), run_evenly(module, batch, quantum))


def test_charging_padding_would_be_noticed():
    """Marking padding elements as real does change the result."""
    module = make_module()
    batch = padded_batch(make_block_documents(LENGTHS))
    module.quantum = 64
    plan = module.plan(masks_of(batch), SEED)
    inputs = {name: batch[name] for name in batch}
    correct = module.score(module.prepare_inputs(**inputs, plan=plan))
    head = replace(plan.head, real_N=torch.ones_like(plan.head.real_N))
    wrong = module.score(module.prepare_inputs(**inputs, plan=replace(plan, head=head)))
    assert wrong.charged.sum() > correct.charged.sum()
    assert wrong.loss != correct.loss


def even_plan(lengths, *, share, seed=0, quantum=16, width=60):
    batch = packed_batch([make_block_documents(lengths, supervised=1.1)], width)
    return plan_blocks(
        masks_of(batch), size=5, first_place=1, anchors=1024, seed=seed, quantum=quantum,
        share_targets=share,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
def test_what_a_recorded_step_keeps_depends_on_sizes_only(share):
    """Host-side values, and tensors that a replay does not replace, are equal for equal sizes."""
    plans = [
        even_plan(lengths, share=share, seed=seed)
        for seed in range(3)
        for lengths in ([20, 20, 17], [25, 18, 14], [57], [9, 9, 9, 9, 9, 9])
    ]
    by_size = {}
    for plan in plans:
        size = tuple(tuple(tensor.shape) for tensor in plan.tensors().values())
        by_size.setdefault(size, []).append(plan)
    assert len(by_size) <= (3 if share else 1)
    assert max(len(group) for group in by_size.values()) > 3
    for first, *others in by_size.values():
        for other in others:
            assert first.counts == other.counts
            assert first.head.group == other.head.group
            assert np.array_equal(first.head.target_host, other.head.target_host)
            assert first.blocks.size == other.blocks.size
            replayed = first.with_tensors(other.tensors())
            assert replayed.blocks.ends_host is None
            for name in ("element_N", "depth_N", "target_N", "real_N"):
                assert torch.equal(getattr(replayed.head, name), getattr(other.head, name))
            for name in ("slot_T", "position_T", "target_M", "supervised_P", "step_valid_K"):
                assert torch.equal(getattr(replayed, name), getattr(other, name))
            assert torch.equal(replayed.element_P, other.element_P)
            for window in (None, 3):
                actual, expected = (plan.blocks.flat(window) for plan in (replayed, other))
                for name in ("slot_N", "first_N", "order_N"):
                    assert torch.equal(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("share", [True, False])
def test_the_sizes_are_round(share):
    plan = even_plan([20, 20, 17], share=share)
    assert len(plan.blocks) % 16 == 0
    assert set(plan.counts) == {len(plan.blocks)}
    assert len(plan.head) == 4 * len(plan.blocks)
    assert len(plan.slot_T) == 64
    exact = even_plan([20, 20, 17], share=share, quantum=0)
    assert int(plan.head.real_N.sum()) == len(exact.head)
    requested = plan.target_M[plan.head.target_N][plan.head.real_N]
    assert sorted(requested.tolist()) == exact.target_M[exact.head.target_N].tolist()
    padding = plan.blocks.slot_N[len(exact.blocks) :]
    assert (padding >= len(exact.slot_T)).all()
    assert torch.equal(padding, plan.blocks.first_N[len(exact.blocks) :])


def test_groups_share_target_slots():
    """With a block at every slot, 4 blocks of 4 depths need 7 target slots, rounded up to 8."""
    batch = packed_batch([make_block_documents([57], supervised=1.1)], 60)
    options = {"size": 5, "first_place": 1, "anchors": 2048, "seed": 0, "quantum": 8}
    shared = plan_blocks(masks_of(batch), **options)
    assert shared.head.group == (16, 8)
    alone = plan_blocks(masks_of(batch), **options, share_targets=False)
    assert alone.head.group == (4, 4)
    assert len(alone.target_M) == len(alone.head)
    assert len(shared.target_M) == len(shared.head) // 2


def test_sizes_are_exact_in_evaluation():
    module, batch = make_module(), padded_batch(make_block_documents(LENGTHS))
    module.quantum = 64
    module.draft_model.eval()
    assert module.plan(masks_of(batch), SEED).head.real_N is None


def test_padding_is_not_read():
    """Changing the features of padding slots changes nothing."""
    documents = make_block_documents([9, 14])
    module = make_module(kind=DSparkTrainerModule)
    batch = padded_batch(documents, width=20)
    expected = run(module, batch)
    changed = dict(batch)
    padding = batch["attention_mask"] == 0
    changed["aux_hidden_states"] = batch["aux_hidden_states"] + 9.0 * padding[..., None]
    module.quantum = 16
    actual = backward(module, module(**changed, seed=SEED))
    assert_same(expected, actual)
    assert F.mse_loss(changed["aux_hidden_states"], batch["aux_hidden_states"]) > 0


def test_the_quantum_is_small():
    module = make_module(anchors=512)
    assert module.can_be_even
    assert module.quantum_for(16_384, sizes=16) == 128  # of 4,096 blocks
    assert module.quantum_for(64, sizes=16) == 8
    assert make_module(anchors=10**6).quantum_for(16_384, sizes=16) == 512
