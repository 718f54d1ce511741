"""Rounding a rollout's sizes up changes nothing: loss, metrics and every gradient stay the same."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_eagle3 import LOSSES, VARIANTS, assert_same, make_module, run

from fledge.rollout.plan import plan_rollout
from fledge.rollout.slots import RowMasks
from objective.naive_eagle3 import make_documents, make_draft, packed_batch


def run_evenly(module, batch, quantum):
    module.quantum = quantum
    result = run(module, batch)
    module.quantum = 0
    return result


def even_plan(batch, quantum, *, steps):
    packing = [batch.get(name) for name in ("position_ids", "seq_lens", "doc_remaining")]
    masks = RowMasks(batch["loss_mask"], batch["attention_mask"], *packing)
    return plan_rollout(masks, num_depths=steps, quantum=quantum)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("variant", ["one layer", "both, two layers", "biases"])
def test_round_sizes_change_nothing(variant, kind):
    module = make_module(make_draft(**VARIANTS[variant]), **LOSSES[kind])
    batch = packed_batch([make_documents([9, 1, 6, 13, 2])], 36)
    expected = run(module, batch)
    for quantum in (1, 16, 100):
        assert_same(expected, run_evenly(module, batch, quantum))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.2, 0.6, 1.1]),
    quantum=st.integers(1, 20),
    attention=st.sampled_from(["fast", "reference"]),
    seed=st.integers(0, 999),
)
def test_round_sizes_change_nothing_for_any_documents(
    lengths, pad, supervised, quantum, attention, seed
):
    module = make_module(make_draft(num_hidden_layers=2), steps=3, attention=attention)
    documents = make_documents(lengths, seed=seed, supervised=supervised)
    batch = packed_batch([documents], sum(lengths) + pad)
    assert_same(run(module, batch), run_evenly(module, batch, quantum))
    plan = even_plan(batch, quantum, steps=3)
    [size] = {len(plan.target_M), *plan.counts}
    assert size % quantum == 0
    assert len(plan.head) == 3 * size
    assert len(plan.slot_T) == -(-(sum(lengths) + pad + 3) // 64) * 64


def test_similar_batches_have_the_same_sizes():
    plans = [
        even_plan(packed_batch([make_documents(lengths, supervised=1.1)], 40), 32, steps=3)
        for lengths in ([9, 9, 9], [12, 8, 7], [25])
    ]
    shapes = {(len(p.slot_T), len(p.target_M), len(p.head), p.counts) for p in plans}
    assert len(shapes) == 1
