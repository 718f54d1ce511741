"""P-EAGLE's rollouts laid out in round sizes are the same rollouts: loss, metrics, gradients."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_eagle3 import (
    make_documents,
    make_head,
    masks_of,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from naive_peagle import make_parallel_draft
from test_peagle import LENGTHS, LOSSES, SEED, VARIANTS, assert_same, make_module, run
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.core.rows import PACKING_FIELDS
from fledge.draft import parallel as draft_parallel
from fledge.kernels.attention.parallel import parallel_attention
from fledge.rollout import even_parallel
from fledge.rollout.context import ContextRanks
from fledge.rollout.parallel_plan import plan_parallel
from fledge.rollout.slots import RowMasks

AS_IT_IS = {name: getattr(even_parallel, name) for name in ("GROUP", "CHAIN_ALIGNED")}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """So that there are several of them, and depths are not all as large as the first."""
    monkeypatch.setattr(even_parallel, "GROUP", 16)
    monkeypatch.setattr(even_parallel, "CHAIN_ALIGNED", 2)


def run_evenly(module, batch, quantum):
    module.quantum = quantum
    found = run(module, batch)
    module.quantum = 0
    return found


def check(module, batch, quanta=(1, 16, 100), *, tolerance=1e-11):
    wanted = run(module, batch)
    for quantum in quanta:
        assert_same(wanted, run_evenly(module, batch, quantum), tolerance=tolerance)
    return wanted[0]


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
def test_of_any_draft(variant):
    module = make_module(make_parallel_draft(**VARIANTS[variant]))
    check(module, packed_batch([make_documents(LENGTHS)], 57), (1, 7, 32))


@pytest.mark.parametrize("kind", ["kl", "lk_lambda"])
def test_balanced_depths(kind):
    module = make_module(**LOSSES[kind], balance_depths=True)
    check(module, packed_batch([make_documents(LENGTHS)], 60))


@pytest.mark.parametrize("depths", [1, 2, 9])
def test_any_number_of_depths(depths):
    check(make_module(depths=depths), packed_batch([make_documents(LENGTHS)], 60))


@pytest.mark.parametrize("max_anchors", [1, 4, 11, 1000])
def test_limited_anchors(max_anchors):
    documents = make_documents(LENGTHS, supervised=1.1)
    module = make_module(max_anchors=max_anchors)
    for rows in ([documents], [documents[:3], documents[3:]]):
        check(module, packed_batch(rows, 60))
        module.quantum = 16
        plan = module.plan(masks_of(packed_batch(rows, 60)), SEED)
        module.quantum = 0
        assert plan.counts[1] <= max(2, max_anchors * len(rows) + 1)  # rounded up to even


@pytest.mark.parametrize(("ratio", "least"), [(1.0, 0.0), (0.7, 0.2), (0.05, 0.0), (0.3, 1.0)])
def test_any_sampling(ratio, least):
    options = {"down_sample_ratio": ratio, "down_sample_ratio_min": least}
    check(make_module(**options), packed_batch([make_documents(LENGTHS, supervised=1.1)], 60))


@pytest.mark.parametrize("chunk_rows", [1, 5, 16, 20, 1000])
def test_in_any_chunks(chunk_rows):
    """Smaller than a group of 16 elements, as large, larger."""
    batch = packed_batch([make_documents(LENGTHS)], 60)
    wanted = run(make_module(), batch)
    assert_same(wanted, run_evenly(make_module(chunk_rows=chunk_rows), batch, 8))


def test_any_supervision():
    batch = packed_batch([make_documents(LENGTHS)], 60)
    check(make_module(), with_logits(batch, make_head()))
    check(make_module(), with_probs(batch, make_head(), *vocabulary()))


@pytest.mark.parametrize("supervised", [-1.0, 1.1])
def test_documents_of_nothing(supervised):
    module = make_module()
    for documents in (make_documents([1], supervised=supervised), make_documents([1, 2, 1])):
        check(module, padded_batch(documents))
    out, grads = run_evenly(module, padded_batch(make_documents(LENGTHS, supervised=-1.0)), 8)
    assert all(bool((grad == 0).all()) for grad in grads.values())
    assert sum(int(getattr(out, each.name).abs().sum()) for each in fields(out)) == 0


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
def test_for_any_documents(lengths, pad, supervised, quantum, max_anchors, attention, seed):
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
    asked = plan.target_M[plan.head.target_N][plan.head.real_N]
    assert asked.tolist() == exact.target_M[exact.head.target_N].tolist()
    assert sorted(plan.head.element_N.tolist()) == list(range(sum(plan.counts)))
    check_padding(plan, exact)


def check_padding(plan, exact):
    """Slots and rows that are padding are documents of their own."""
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
    """Packs of one length, of documents as different as they may be."""
    rng, tokens, quantum = np.random.default_rng(seed), 2048, 128
    vars(even_parallel).update(AS_IT_IS)
    sizes, most = set(), 0
    for step in range(30):
        masks = random_masks(rng, tokens, shortest, supervised)
        plan = plan_parallel(
            masks, num_depths=8, ratio=0.7, ratio_min=0.2, seed=step, quantum=quantum
        )
        sizes.add(tuple(tuple(tensor.shape) for tensor in plan.tensors().values()))
        most = max(most, sum(plan.counts))
    assert len(sizes) <= tokens // quantum
    assert most <= (3.38 * tokens) + 7 * 16


def test_few_target_slots_are_asked_for_twice():
    rng = np.random.default_rng(0)
    vars(even_parallel).update(AS_IT_IS)
    for seed in range(10):
        masks, draw = random_masks(rng, 4096, 250, 1.0), {"ratio": 0.7, "ratio_min": 0.2}
        exact = plan_parallel(masks, num_depths=8, seed=seed, **draw)
        plan = plan_parallel(masks, num_depths=8, seed=seed, quantum=256, **draw)
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
    """Refuses what would wait for a GPU, or read numbers of the host, in a recorded pass."""

    REFUSED = ("nonzero", "_local_scalar_dense", "masked_select", "unique", "lift_fresh")
    paused = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert self.paused or not name.lstrip("_").startswith(self.REFUSED), func
        if name in ("index", "index_put_", "index_put") and not self.paused:
            assert all(x is None or x.dtype == torch.int64 for x in args[1]), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", LOSSES)
def test_passes_depend_on_sizes_alone(kind, monkeypatch):
    """All but attention, which is a kernel's: embedding, layers, head, loss and gradients."""
    module, batch = make_module(**LOSSES[kind]), packed_batch([make_documents(LENGTHS)], 60)
    wanted = run(module, batch)
    module.quantum = 16
    plan = module.plan(masks_of(batch), SEED)
    shapes = StaticShapes()

    def by_definition(*args, kind, starts_K):
        shapes.paused = True
        out = parallel_attention(*args, kind="reference")
        shapes.paused = False
        assert starts_K.tolist() == [0, *np.cumsum(args[-1])]
        return out

    monkeypatch.setattr(draft_parallel, "parallel_attention", by_definition)
    module.zero_grad()
    told = {name: given for name, given in batch.items() if name not in PACKING_FIELDS}
    with shapes:
        out = module.score(module.prepare_inputs(**told, plan=plan.with_tensors(plan.tensors())))
        out.loss.backward()
    grads = {name: p.grad for name, p in module.draft_model.named_parameters()}
    assert_same(wanted, (out, grads))


def even_plan(lengths, *, seed=0, quantum=16, width=60):
    batch = packed_batch([make_documents(lengths, supervised=1.1)], width)
    return plan_parallel(
        masks_of(batch), num_depths=4, ratio=0.7, ratio_min=0.2, seed=seed, quantum=quantum
    )


def test_what_a_recording_keeps_follows_from_the_sizes():
    """All that the host knows, and all tensors that are not read anew."""
    by_size = {}
    for seed in range(3):
        for lengths in ([20, 20, 17], [25, 18, 14], [57], [9, 9, 9, 9, 9, 9]):
            plan = even_plan(lengths, seed=seed)
            size = tuple(tuple(tensor.shape) for tensor in plan.tensors().values())
            by_size.setdefault(size, []).append(plan)
    assert len(by_size) <= 3
    assert max(len(alike) for alike in by_size.values()) > 3
    for one, *others in by_size.values():
        for other in others:
            assert_alike(one.with_tensors(other.tensors()), other)


def assert_alike(mine, theirs):
    """All that is read of a plan, the same or not known to the host."""
    for each in fields(theirs):
        value, other = getattr(mine, each.name), getattr(theirs, each.name)
        if isinstance(other, torch.Tensor):
            assert torch.equal(value, other), each.name
        elif isinstance(other, np.ndarray):
            assert np.array_equal(value, other), each.name
        elif each.name == "sorted_host":
            assert value is None
        elif each.name in ("segments", "depths"):
            assert_alike(value[0], other[0])
        elif hasattr(other, "__dataclass_fields__"):
            assert_alike(value, other)
        else:
            assert value == other, each.name


def test_the_example():
    """Of the module's docstring."""
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), None, 4) == (4, 4, 2)
    even_parallel.CHAIN_ALIGNED = 1
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), None, 4) == (4, 3, 2)
    assert even_parallel._counts(3, (1.0, 0.7, 0.49), 1, 4) == (4, 1, 1)


def test_tests_would_notice():
    """Elements that are padding would be charged, were they called real."""
    module, batch = make_module(), padded_batch(make_documents(LENGTHS))
    module.quantum = 64
    plan = module.plan(masks_of(batch), SEED)
    honest = module.score(module.prepare_inputs(**batch, plan=plan))
    head = replace(plan.head, real_N=torch.ones_like(plan.head.real_N))
    wrong = module.score(module.prepare_inputs(**batch, plan=replace(plan, head=head)))
    assert wrong.charged.sum() > honest.charged.sum()
    assert wrong.loss != honest.loss


def test_what_lies_in_padding_is_not_read():
    """Other features of slots that no document has."""
    module, batch = make_module(), padded_batch(make_documents([9, 14]), width=20)
    wanted = run(module, batch)
    hole = batch["attention_mask"] == 0
    assert hole.any()
    other = batch | {"aux_hidden_states": batch["aux_hidden_states"] + 9.0 * hole[..., None]}
    assert_same(wanted, run_evenly(module, other, 16))


def test_in_evaluation_sizes_are_exact():
    module, batch = make_module(), padded_batch(make_documents(LENGTHS))
    module.quantum = 64
    module.draft_model.eval()
    assert module.plan(masks_of(batch), SEED).head.real_N is None


def test_which_objectives_can():
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
