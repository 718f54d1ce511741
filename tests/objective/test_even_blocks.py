"""Blocks laid out in round sizes are the same blocks: loss, metrics and every gradient."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fledge.objective.dspark import DSparkTrainerModule
from fledge.objective.losses.lk_lambda import LkLambda
from fledge.rollout import even_blocks
from fledge.rollout.block_plan import plan_blocks
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
    """So that there are several of them."""
    monkeypatch.setattr(even_blocks, "GROUP", 4)
    monkeypatch.setattr(even_blocks, "SHARES", 2)


def run_or_zero(module, batch, **extra):
    """Parameters that a loss does not read have no gradient."""
    out = module(**batch, seed=SEED, **extra)
    module.zero_grad()
    out.loss.backward()
    named = module.draft_model.named_parameters()
    zero = torch.zeros_like
    return out, {name: zero(p) if p.grad is None else p.grad.clone() for name, p in named}


def run_evenly(module, batch, quantum):
    module.quantum = quantum
    found = run_or_zero(module, batch)
    module.quantum = 0
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["fast", "reference"])
def test_round_sizes_change_nothing(kind, attention):
    module = make_module(**KINDS[kind], attention=attention)
    documents = make_block_documents(LENGTHS)
    for batch in (packed_batch([documents], 60), padded_batch(documents)):
        wanted = run_or_zero(module, batch)
        assert wanted[0].loss > 0
        for quantum in (1, 16, 100):
            assert_same(wanted, run_evenly(module, batch, quantum))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["text", "kl", "dspark"])
def test_of_any_draft(variant, kind):
    make = make_spark_draft if kind == "dspark" else make_block_draft
    module = make_module(make(**VARIANTS[variant]), **KINDS[kind])
    batch = packed_batch([make_block_documents(LENGTHS)], 57)
    wanted = run_or_zero(module, batch)
    for quantum in (1, 7, 32):
        assert_same(wanted, run_evenly(module, batch, quantum))


@pytest.mark.parametrize("kind", ["text", "dpace", "kl", "dspark"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 12, 100])
def test_in_any_chunks(kind, chunk_rows):
    """Smaller than a group of 4 blocks of 3 depths (4, of DSpark), as large, larger."""
    batch = packed_batch([make_block_documents(LENGTHS)], 60)
    wanted = run_or_zero(make_module(**KINDS[kind]), batch)
    module = make_module(**KINDS[kind], chunk_rows=chunk_rows)
    assert_same(wanted, run_evenly(module, batch, 8))


@pytest.mark.parametrize("kind", ["text", "dpace", "kl"])
def test_a_reduced_vocabulary(kind):
    ids = torch.arange(0, V, 2)
    draft = make_block_draft(draft_vocab_size=len(ids))
    draft.set_vocab_mapping(ids)
    draft.copy_head_from_target(Table(V, torch.float64))
    module = make_module(draft, **KINDS[kind])
    batch = padded_batch(make_block_documents([30, 25], supervised=1.1))
    assert_same(run_or_zero(module, batch), run_evenly(module, batch, 16))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_supervised(kind):
    module = make_module(**KINDS[kind])
    for documents in (make_block_documents(LENGTHS, supervised=-1), make_block_documents([1])):
        out, grads = run_evenly(module, padded_batch(documents), 8)
        assert out.loss == 0
        assert all(bool((grad == 0).all()) for grad in grads.values())
        assert sum(int(getattr(out, each.name).abs().sum()) for each in fields(out)) == 0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.1]),
    quantum=st.integers(1, 20),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 999),
)
def test_for_any_documents(lengths, pad, supervised, quantum, kind, seed):
    module = make_module(**KINDS[kind])
    documents = make_block_documents(lengths, seed=seed, supervised=supervised)
    batch = packed_batch([documents], sum(lengths) + pad)
    assert_same(run_or_zero(module, batch), run_evenly(module, batch, quantum))


def test_tests_would_notice():
    """Elements that are padding would be charged, were they called real."""
    module = make_module()
    batch = padded_batch(make_block_documents(LENGTHS))
    module.quantum = 64
    plan = module.plan(masks_of(batch), SEED)
    told = {name: batch[name] for name in batch}
    honest = module.score(module.prepare_inputs(**told, plan=plan))
    head = replace(plan.head, real_N=torch.ones_like(plan.head.real_N))
    wrong = module.score(module.prepare_inputs(**told, plan=replace(plan, head=head)))
    assert wrong.charged.sum() > honest.charged.sum()
    assert wrong.loss != honest.loss


def even_plan(lengths, *, share, seed=0, quantum=16, width=60):
    batch = packed_batch([make_block_documents(lengths, supervised=1.1)], width)
    return plan_blocks(
        masks_of(batch), size=5, first_place=1, anchors=1024, seed=seed, quantum=quantum,
        share_targets=share,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False])
def test_what_a_recording_keeps_follows_from_the_sizes(share):
    """All that the host knows, and all tensors that are not read anew."""
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
    assert max(len(alike) for alike in by_size.values()) > 3
    for one, *others in by_size.values():
        for other in others:
            assert one.counts == other.counts
            assert one.head.group == other.head.group
            assert np.array_equal(one.head.target_host, other.head.target_host)
            assert one.blocks.size == other.blocks.size
            taken = one.with_tensors(other.tensors())
            assert taken.blocks.ends_host is None
            for name in ("element_N", "depth_N", "target_N", "real_N"):
                assert torch.equal(getattr(taken.head, name), getattr(other.head, name))
            for name in ("slot_T", "position_T", "target_M", "supervised_P", "step_valid_K"):
                assert torch.equal(getattr(taken, name), getattr(other, name))
            assert torch.equal(taken.element_P, other.element_P)
            for window in (None, 3):
                ours, theirs = (plan.blocks.flat(window) for plan in (taken, other))
                for name in ("slot_N", "first_N", "order_N"):
                    assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("share", [True, False])
def test_the_sizes_are_round(share):
    plan = even_plan([20, 20, 17], share=share)
    assert len(plan.blocks) % 16 == 0
    assert set(plan.counts) == {len(plan.blocks)}
    assert len(plan.head) == 4 * len(plan.blocks)
    assert len(plan.slot_T) == 64
    exact = even_plan([20, 20, 17], share=share, quantum=0)
    assert int(plan.head.real_N.sum()) == len(exact.head)
    asked = plan.target_M[plan.head.target_N][plan.head.real_N]
    assert sorted(asked.tolist()) == exact.target_M[exact.head.target_N].tolist()
    padding = plan.blocks.slot_N[len(exact.blocks) :]
    assert (padding >= len(exact.slot_T)).all()
    assert torch.equal(padding, plan.blocks.first_N[len(exact.blocks) :])


def test_groups_share_target_slots():
    """Of blocks at every slot, a group of 4 with 4 depths asks for 7 slots, rounded up to 8."""
    batch = packed_batch([make_block_documents([57], supervised=1.1)], 60)
    given = {"size": 5, "first_place": 1, "anchors": 2048, "seed": 0, "quantum": 8}
    shared = plan_blocks(masks_of(batch), **given)
    assert shared.head.group == (16, 8)
    alone = plan_blocks(masks_of(batch), **given, share_targets=False)
    assert alone.head.group == (4, 4)
    assert len(alone.target_M) == len(alone.head)
    assert len(shared.target_M) == len(shared.head) // 2


def test_in_evaluation_sizes_are_exact():
    module, batch = make_module(), padded_batch(make_block_documents(LENGTHS))
    module.quantum = 64
    module.draft_model.eval()
    assert module.plan(masks_of(batch), SEED).head.real_N is None


def test_what_lies_in_padding_is_not_read():
    """Other features and tokens of slots that no document has."""
    documents = make_block_documents([9, 14])
    module = make_module(kind=DSparkTrainerModule)
    batch = padded_batch(documents, width=20)
    wanted = run(module, batch)
    other = dict(batch)
    hole = batch["attention_mask"] == 0
    other["aux_hidden_states"] = batch["aux_hidden_states"] + 9.0 * hole[..., None]
    module.quantum = 16
    found = backward(module, module(**other, seed=SEED))
    assert_same(wanted, found)
    assert F.mse_loss(other["aux_hidden_states"], batch["aux_hidden_states"]) > 0


def test_blocks_are_rounded_up_by_little():
    module = make_module(anchors=512)
    assert module.can_be_even
    assert module.quantum_for(16_384, sizes=16) == 128  # of 4,096 blocks
    assert module.quantum_for(64, sizes=16) == 8
    assert make_module(anchors=10**6).quantum_for(16_384, sizes=16) == 512
