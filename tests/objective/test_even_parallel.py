"""Rounding the sizes of P-EAGLE's rollouts up changes nothing: loss, metrics, gradients."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_peagle import LENGTHS, LOSSES, SEED, VARIANTS, assert_same, make_module, run
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.core.rows import PACKING_FIELDS
from fledge.methods.peagle import draft as draft_parallel
from fledge.methods.peagle import plan as even_parallel
from fledge.methods.peagle.draft import parallel_attention
from fledge.methods.peagle.plan import plan_parallel
from fledge.rollout.context import ContextRanks
from fledge.rollout.slots import RowMasks
from objective.naive_eagle3 import (
    make_documents,
    make_head,
    masks_of,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from objective.naive_peagle import make_parallel_draft

REAL_SIZES = {name: getattr(even_parallel, name) for name in ("GROUP", "CHAIN_ALIGNED")}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Small groups, so that there are several of them and depths differ in size."""
    monkeypatch.setattr(even_parallel, "GROUP", 16)
    monkeypatch.setattr(even_parallel, "CHAIN_ALIGNED", 2)


def run_evenly(module, batch, quantum):
    module.quantum = quantum
    result = run(module, batch)
    module.quantum = 0
    return result


def check(module, batch, quanta=(1, 16, 100), *, tolerance=1e-11):
    expected = run(module, batch)
    for quantum in quanta:
        assert_same(expected, run_evenly(module, batch, quantum), tolerance=tolerance)
    return expected[0]


@pytest.mark.parametrize("attention", ["fast", "reference"])
@pytest.mark.parametrize("kind", LOSSES)
def test_round_sizes_change_nothing(kind, attention):
    module = make_module(**LOSSES[kind], attention=attention)
    documents = make_documents(LENGTHS)
    for batch in (
        padded_batch(documents),
        packed_batch([documents], 60),
        packed_batch([documents[:4], documents[4:]], 33),
    ):
        assert check(module, batch).loss > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_sizes_change_nothing_for_any_draft(variant):
    module = make_module(make_parallel_draft(**VARIANTS[variant]))
    check(module, packed_batch([make_documents(LENGTHS)], 57), (1, 7, 32))


@pytest.mark.parametrize("kind", ["kl", "lk_lambda"])
def test_round_sizes_change_nothing_with_balanced_depths(kind):
    module = make_module(**LOSSES[kind], balance_depths=True)
    check(module, packed_batch([make_documents(LENGTHS)], 60))


@pytest.mark.parametrize("depths", [1, 2, 9])
def test_round_sizes_change_nothing_for_any_number_of_depths(depths):
    check(make_module(depths=depths), packed_batch([make_documents(LENGTHS)], 60))


@pytest.mark.parametrize("max_anchors", [1, 4, 11, 1000])
def test_round_sizes_change_nothing_with_capped_anchors(max_anchors):
    documents = make_documents(LENGTHS, supervised=1.1)
    module = make_module(max_anchors=max_anchors)
    for rows in ([documents], [documents[:3], documents[3:]]):
        check(module, packed_batch(rows, 60))
        module.quantum = 16
        plan = module.plan(masks_of(packed_batch(rows, 60)), SEED)
        module.quantum = 0
        assert plan.counts[1] <= max(2, max_anchors * len(rows) + 1)  # rounded up to an even number


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 0.0), (0.7, 0.2), (0.05, 0.0), (0.3, 1.0)])
def test_round_sizes_change_nothing_for_any_sampling_ratios(ratio, least):
    options = {"down_sample_ratio": ratio, "down_sample_ratio_min": least}
    check(make_module(**options), packed_batch([make_documents(LENGTHS, supervised=1.1)], 60))


@pytest.mark.parametrize("chunk_rows", [1, 5, 16, 20, 1000])
def test_round_sizes_change_nothing_for_any_chunk_size(chunk_rows):
    """Chunks smaller than, as large as and larger than a group of 16 elements."""
    batch = packed_batch([make_documents(LENGTHS)], 60)
    expected = run(make_module(), batch)
    assert_same(expected, run_evenly(make_module(chunk_rows=chunk_rows), batch, 8))


def test_round_sizes_change_nothing_for_any_supervision():
    batch = packed_batch([make_documents(LENGTHS)], 60)
    check(make_module(), with_logits(batch, make_head()))
    check(make_module(), with_probs(batch, make_head(), *vocabulary()))


@pytest.mark.parametrize("supervised", [-1.0, 1.1])
def test_tiny_and_unsupervised_documents(supervised):
    module = make_module()
    for documents in (make_documents([1], supervised=supervised), make_documents([1, 2, 1])):
        check(module, padded_batch(documents))
    out, grads = run_evenly(module, padded_batch(make_documents(LENGTHS, supervised=-1.0)), 8)
    assert all(bool((grad == 0).all()) for grad in grads.values())
    assert sum(int(getattr(out, field.name).abs().sum()) for field in fields(out)) == 0


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.1]),
    quantum=st.integers(1, 20),
    max_anchors=st.sampled_from([None, 1, 3]),
    attention=st.sampled_from(["fast", "reference"]),
    seed=st.integers(0, 999),
)
def test_round_sizes_change_nothing_for_any_documents(
    lengths, pad, supervised, quantum, max_anchors, attention, seed
):
    module = make_module(max_anchors=max_anchors, attention=attention)
    documents = make_documents(lengths, seed=seed, supervised=supervised)
    batch = packed_batch([documents], sum(lengths) + pad)
    check(module, batch, (quantum,))
    module.quantum = quantum
    plan = module.plan(masks_of(batch), SEED)
    module.quantum = 0
    exact = module.plan(masks_of(batch), SEED)
    assert len(plan.slot_T) == -(-(sum(lengths) + pad + 1) // 64) * 64
    assert plan.counts[0] == -(-max(1, exact.counts[0]) // quantum) * quantum
    assert len(plan.head) == sum(plan.counts)
    assert int(plan.head.real_N.sum()) == len(exact.head)
    requested = plan.target_M[plan.head.target_N][plan.head.real_N]
    assert requested.tolist() == exact.target_M[exact.head.target_N].tolist()
    assert sorted(plan.head.element_N.tolist()) == list(range(sum(plan.counts)))
    check_padding(plan, exact)


def check_padding(plan, exact):
    """Every padding slot is a document of its own, and padding rows are on the first of them."""
    real_T, real_N, [segment] = len(exact.slot_T), exact.counts[0], plan.segments
    assert torch.equal(plan.every.first_N[real_T:], torch.arange(real_T, len(plan.slot_T)))
    assert (plan.every.first_N[:real_T] < max(1, real_T)).all()
    row = torch.cat([torch.arange(count) for count in plan.counts])
    padding = segment.asking.slot_N[row >= real_N]
    assert (padding == real_T).all()
    assert torch.equal(padding, segment.asking.first_N[row >= real_N])
    assert (segment.asking.slot_N[row < real_N] < real_T).all()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999), shortest=st.integers(1, 300), supervised=st.floats(0.3, 1.0))
def test_there_are_few_sizes(seed, shortest, supervised):
    """Rows of one length, packed with very different documents."""
    rng, tokens, quantum = np.random.default_rng(seed), 2048, 128
    vars(even_parallel).update(REAL_SIZES)
    sizes, max_elements = set(), 0
    for step in range(30):
        masks = random_masks(rng, tokens, shortest, supervised)
        plan = plan_parallel(
            masks, num_depths=8, ratio=0.7, ratio_min=0.2, seed=step, quantum=quantum
        )
        sizes.add(tuple(tuple(tensor.shape) for tensor in plan.tensors().values()))
        max_elements = max(max_elements, sum(plan.counts))
    assert len(sizes) <= tokens // quantum
    assert max_elements <= (3.38 * tokens) + 7 * 16


def test_few_target_slots_are_requested_twice():
    rng = np.random.default_rng(0)
    vars(even_parallel).update(REAL_SIZES)
    for seed in range(10):
        masks, ratios = random_masks(rng, 4096, 250, 1.0), {"ratio": 0.7, "ratio_min": 0.2}
        exact = plan_parallel(masks, num_depths=8, seed=seed, **ratios)
        plan = plan_parallel(masks, num_depths=8, seed=seed, quantum=256, **ratios)
        assert len(plan.target_M) < 1.5 * len(exact.target_M)


def random_masks(rng, tokens, shortest, supervised):
    lengths = []
    while sum(lengths) < tokens:
        length = int(rng.integers(shortest, 2 * shortest + 1))
        lengths.append(min(length, tokens - sum(lengths)))
    starts = [np.arange(n) >= round(n * (1 - supervised * rng.random())) for n in lengths]
    places = [torch.arange(n) for n in lengths]
    return RowMasks(
        torch.from_numpy(np.concatenate(starts)).long()[None],
        torch.ones(1, tokens, dtype=torch.int64),
        torch.cat(places)[None],
        torch.tensor([lengths]),
        torch.cat([n - 1 - place for n, place in zip(lengths, places, strict=True)])[None],
    )


class StaticShapes(TorchDispatchMode):
    """Rejects operations that would synchronize with a GPU or copy host data in a recorded pass."""

    REFUSED = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "lift_fresh")
    paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert self.paused or not name.lstrip("_").startswith(self.REFUSED), func
        if name in ("index", "index_put_", "index_put") and not self.paused:
            assert all(x is None or x.dtype == torch.int64 for x in args[1]), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", LOSSES)
def test_passes_depend_on_sizes_only(kind, monkeypatch):
    """Embedding, layers, head, loss and gradients; attention, which is a kernel, is exempt."""
    module, batch = make_module(**LOSSES[kind]), packed_batch([make_documents(LENGTHS)], 60)
    expected = run(module, batch)
    module.quantum = 16
    plan = module.plan(masks_of(batch), SEED)
    shapes = StaticShapes()

    def reference_attention(*args, kind, starts_K):
        shapes.paused = True
        out = parallel_attention(*args, kind="reference")
        shapes.paused = False
        assert starts_K.tolist() == [0, *np.cumsum(args[-1])]
        return out

    monkeypatch.setattr(draft_parallel, "parallel_attention", reference_attention)
    module.zero_grad()
    inputs = {name: tensor for name, tensor in batch.items() if name not in PACKING_FIELDS}
    with shapes:
        out = module.score(module.prepare_inputs(**inputs, plan=plan.with_tensors(plan.tensors())))
        out.loss.backward()
    grads = {name: p.grad for name, p in module.draft_model.named_parameters()}
    assert_same(expected, (out, grads))


def even_plan(lengths, *, seed=0, quantum=16, width=60):
    batch = packed_batch([make_documents(lengths, supervised=1.1)], width)
    return plan_parallel(
        masks_of(batch), num_depths=4, ratio=0.7, ratio_min=0.2, seed=seed, quantum=quantum
    )


def test_what_a_recorded_step_keeps_depends_on_sizes_only():
    """Host-side values, and tensors that a replay does not replace, are equal for equal sizes."""
    by_size = {}
    for seed in range(3):
        for lengths in ([20, 20, 17], [25, 18, 14], [57], [9, 9, 9, 9, 9, 9]):
            plan = even_plan(lengths, seed=seed)
            size = tuple(tuple(tensor.shape) for tensor in plan.tensors().values())
            by_size.setdefault(size, []).append(plan)
    assert len(by_size) <= 3
    assert max(len(group) for group in by_size.values()) > 3
    for first, *others in by_size.values():
        for other in others:
            assert_plans_equal(first.with_tensors(other.tensors()), other)


def assert_plans_equal(actual, expected):
    """Check that all fields of a plan are equal, or None if the host does not have them."""
    for field in fields(expected):
        value, expected_value = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(expected_value, torch.Tensor):
            assert torch.equal(value, expected_value), field.name
        elif isinstance(expected_value, np.ndarray):
            assert np.array_equal(value, expected_value), field.name
        elif field.name == "sorted_host":
            assert value is None
        elif field.name in ("segments", "depths"):
            assert_plans_equal(value[0], expected_value[0])
        elif hasattr(expected_value, "__dataclass_fields__"):
            assert_plans_equal(value, expected_value)
        else:
            assert value == expected_value, field.name


def test_the_example_of_the_module_docstring():
    """The example of the docstring of `even_parallel`."""
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), None, 4) == (4, 4, 2)
    even_parallel.CHAIN_ALIGNED = 1
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), None, 4) == (4, 3, 2)
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), 1, 4) == (4, 1, 1)


def test_charging_padding_would_be_noticed():
    """Marking padding elements as real does change the result."""
    module, batch = make_module(), padded_batch(make_documents(LENGTHS))
    module.quantum = 64
    plan = module.plan(masks_of(batch), SEED)
    correct = module.score(module.prepare_inputs(**batch, plan=plan))
    head = replace(plan.head, real_N=torch.ones_like(plan.head.real_N))
    wrong = module.score(module.prepare_inputs(**batch, plan=replace(plan, head=head)))
    assert wrong.charged.sum() > correct.charged.sum()
    assert wrong.loss != correct.loss


def test_padding_is_not_read():
    """Changing the features of padding slots changes nothing."""
    module, batch = make_module(), padded_batch(make_documents([9, 14]), width=20)
    expected = run(module, batch)
    padding = batch["attention_mask"] == 0
    assert padding.any()
    changed = batch | {"aux_hidden_states": batch["aux_hidden_states"] + 9.0 * padding[..., None]}
    assert_same(expected, run_evenly(module, changed, 16))


def test_sizes_are_exact_in_evaluation():
    module, batch = make_module(), padded_batch(make_documents(LENGTHS))
    module.quantum = 64
    module.draft_model.eval()
    assert module.plan(masks_of(batch), SEED).head.real_N is None


def test_which_objectives_support_round_sizes():
    assert make_module().can_be_even
    assert make_module(max_anchors=4).can_be_even
    assert not make_module(sequence_partitions=2).can_be_even
    assert make_module().quantum_for(4096, sizes=16) == 256
    assert make_module().quantum_for(64, sizes=16) == 16
    ranks = ContextRanks(rank=0, size=2, group=None)
    assert not make_module(context=ranks).can_be_even
    masks = masks_of(padded_batch(make_documents(LENGTHS)))
    options = {"num_depths": 4, "ratio": 0.7, "ratio_min": 0.2, "seed": 0, "quantum": 8}
    with pytest.raises(ValueError, match="quantum"):
        plan_parallel(masks, **options, partitions=2)
    with pytest.raises(ValueError, match="quantum"):
        plan_parallel(masks, **options, ranks=ranks)
