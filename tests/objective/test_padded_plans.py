"""Rounding the sizes of a step up changes nothing: loss, metrics and every gradient."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.core.graphs import tensors_of, with_tensors
from fledge.core.rows import PACKING_FIELDS
from fledge.methods.block.plan import plan_blocks
from fledge.methods.peagle import draft as parallel_draft
from fledge.methods.peagle import plan as parallel
from fledge.methods.peagle.draft import parallel_attention
from fledge.methods.peagle.plan import plan_parallel
from fledge.rollout import plan as rollouts
from fledge.rollout.context import ContextRanks
from fledge.rollout.plan import plan_rollout
from objective.cases import (
    EVEN_KINDS,
    KINDS,
    LENGTHS,
    SEED,
    assert_same,
    dflash,
    dspark,
    eagle3,
    peagle,
    reduced_block_draft,
    run,
)
from objective.naive_block import make_block_documents
from objective.naive_eagle3 import (
    make_documents,
    masks_of,
    packed_batch,
    padded_batch,
)
from objective.test_block import VARIANTS as BLOCK_VARIANTS

RATIOS = {"ratio": 0.7, "ratio_min": 0.2}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Small groups, so that there are several of them and depths differ in size."""
    monkeypatch.setattr(rollouts, "GROUP", 16)
    monkeypatch.setattr(parallel, "CHAIN_ALIGNED", 2)


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
@pytest.mark.parametrize("name", EVEN_KINDS)
def test_round_sizes_change_nothing(name, attention):
    kind = EVEN_KINDS[name]
    module, documents = kind.make(attention=attention), kind.documents(LENGTHS)
    for batch in (
        padded_batch(documents),
        packed_batch([documents], 60),
        packed_batch([documents[:4], documents[4:]], 37),
    ):
        # transformers' own layers compute their norms in float32
        assert check(module, batch, tolerance=1e-7 if "hosted" in name else 1e-11).loss > 0


OPTIONS = {
    "peagle, 9 depths": (peagle, {"depths": 9}),
    "peagle, all kept": (peagle, {"down_sample_ratio": 1.0}),
    "dspark, sliding": (dspark, {"changes": BLOCK_VARIANTS["sliding"]}),
    "dflash dpace, reduced": (
        lambda **o: dflash(reduced_block_draft(), **o), {"weights": "dpace"}
    ),
    "dflash kl, reduced": (lambda **o: dflash(reduced_block_draft(), **o), {"loss": "kl"}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_round_sizes_change_nothing_for_any_draft(name):
    make, options = OPTIONS[name]
    documents_of = make_documents if "eagle" in name else make_block_documents
    documents = documents_of(LENGTHS, supervised=1.1 if "kept" in name else 0.7)
    check(make(**options), packed_batch([documents], 57), (1, 7, 32))


def even_plan_of(module, batch, quantum):
    module.quantum = quantum
    plan = module.plan(masks_of(batch), SEED)
    module.quantum = 0
    return plan


@pytest.mark.parametrize("name", ["peagle kl", "dflash", "dflash dpace", "dflash kl", "dspark"])
@pytest.mark.parametrize("chunk_rows", [1, 5, 12, 16, 20, 1000])
def test_round_sizes_change_nothing_for_any_chunk_size(name, chunk_rows):
    """Chunks smaller than, as large as and larger than a group."""
    kind = KINDS[name]
    batch = packed_batch([kind.documents(LENGTHS)], 60)
    assert_same(run(kind.make(), batch), run_evenly(kind.make(chunk_rows=chunk_rows), batch, 8))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.1]),
    quantum=st.integers(1, 20),
    attention=st.sampled_from(["fast", "reference"]),
    name=st.sampled_from(sorted(EVEN_KINDS)),
    seed=st.integers(0, 999),
)
def test_round_sizes_change_nothing_for_any_documents(
    lengths, pad, supervised, quantum, attention, name, seed
):
    kind = EVEN_KINDS[name]
    module = kind.make(attention=attention)
    documents = kind.documents(lengths, seed=seed, supervised=supervised)
    check(module, packed_batch([documents], sum(lengths) + pad), (quantum,))


# --- what is laid out ----------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.0, 0.3, 0.7, 1.1]),
    quantum=st.integers(1, 20),
)
def test_the_sizes_are_round(lengths, pad, supervised, quantum):
    width = sum(lengths) + pad
    batch = packed_batch([make_documents(lengths, supervised=supervised)], width)
    plan = plan_rollout(masks_of(batch), num_depths=3, quantum=quantum)
    [size] = {*plan.counts}
    assert size % quantum == 0
    assert len(plan.head) == 3 * size
    assert len(plan.slot_T) == -(-(width + 3) // 64) * 64

    module = peagle()
    plan, exact = (even_plan_of(module, batch, n) for n in (quantum, 0))
    assert len(plan.slot_T) == -(-(width + 1) // 64) * 64
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


def block_plan(batch, *, share, seed=0, quantum=16):
    options = {"place": (5, 1), "anchors": 1024, "share_targets": share}
    return plan_blocks(masks_of(batch), **options, seed=seed, quantum=quantum)


@pytest.mark.parametrize("share", [True, False])
def test_the_sizes_of_blocks_are_round(share):
    batch = packed_batch([make_block_documents([20, 20, 17], supervised=1.1)], 60)
    plan, exact = (block_plan(batch, share=share, quantum=n) for n in (16, 0))
    assert len(plan.blocks) % 16 == 0
    assert set(plan.counts) == {len(plan.blocks)}
    assert len(plan.head) == 4 * len(plan.blocks)
    assert len(plan.slot_T) == 64
    assert int(plan.head.real_N.sum()) == len(exact.head)
    requested = plan.target_M[plan.head.target_N][plan.head.real_N]
    assert sorted(requested.tolist()) == exact.target_M[exact.head.target_N].tolist()
    padding = plan.blocks.slot_N[len(exact.blocks) :]
    assert (padding >= len(exact.slot_T)).all()
    assert torch.equal(padding, plan.blocks.first_N[len(exact.blocks) :])


def test_groups_share_target_slots():
    """With a block at every slot, 16 elements need 5 target slots, rounded up to 6."""
    batch = packed_batch([make_block_documents([57], supervised=1.1)], 60)
    options = {"place": (5, 1), "anchors": 2048, "seed": 0, "quantum": 8}
    shared = plan_blocks(masks_of(batch), **options)
    assert shared.head.group == (16, 6)
    alone = plan_blocks(masks_of(batch), **options, share_targets=False)
    assert alone.head.group == (1, 1)
    assert len(alone.target_M) == len(alone.head)
    assert len(shared.target_M) == len(shared.head) // 16 * 6


def test_the_example_of_the_padded_plan():
    """In the comments of `peagle/plan.py`."""
    assert parallel._counts(3, (1.0, 0.7, 0.49), 4) == (4, 4, 2)
    parallel.CHAIN_ALIGNED = 1
    assert parallel._counts(3, (1.0, 0.7, 0.49), 4) == (4, 3, 2)


PLANNERS = {
    "eagle3": lambda batch, seed: plan_rollout(masks_of(batch), num_depths=4, quantum=32),
    "peagle": lambda batch, seed: plan_parallel(
        masks_of(batch), num_depths=4, **RATIOS, seed=seed, quantum=16
    ),
    "blocks that share targets": lambda batch, seed: block_plan(batch, share=True, seed=seed),
    "blocks": lambda batch, seed: block_plan(batch, share=False, seed=seed),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_what_a_recorded_step_keeps_depends_on_sizes_only(name):
    """Host-side values, and tensors that a replay does not replace, are equal for equal sizes."""
    documents_of = make_block_documents if "block" in name else make_documents
    by_size = {}
    for seed in range(3):
        for lengths in ([20, 20, 17], [25, 18, 14], [57], [9, 9, 9, 9, 9, 9]):
            batch = packed_batch([documents_of(lengths, supervised=1.1)], 60)
            plan = PLANNERS[name](batch, seed)
            size = tuple(tuple(tensor.shape) for tensor in tensors_of(plan).values())
            by_size.setdefault(size, []).append(plan)
    assert len(by_size) <= 3
    assert max(len(group) for group in by_size.values()) > 3
    for first, *others in by_size.values():
        for other in others:
            replayed = with_tensors(first, tensors_of(other))
            assert_plans_equal(replayed, other)
            if "block" in name:
                for window in (None, 3):
                    assert_plans_equal(*(plan.blocks.flat(window) for plan in (replayed, other)))


def assert_plans_equal(actual, expected):
    """Check that all fields of a plan are equal, or None if the host does not have them."""
    for field in fields(expected):
        value, expected_value = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in ("sorted_host", "ends_host"):
            assert value is None or field.name == "sorted_host"
        elif isinstance(expected_value, torch.Tensor):
            assert torch.equal(value, expected_value), field.name
        elif isinstance(expected_value, np.ndarray):
            assert np.array_equal(value, expected_value), field.name
        elif field.name in ("segments", "depths"):
            assert_plans_equal(value[0], expected_value[0])
        elif hasattr(expected_value, "__dataclass_fields__"):
            assert_plans_equal(value, expected_value)
        else:
            assert value == expected_value, field.name


# --- what is read --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", [name for name in EVEN_KINDS if "peagle" in name])
def test_passes_depend_on_sizes_only(name, monkeypatch):
    """Embedding, layers, head, loss and gradients; attention, which is a kernel, is exempt."""
    module, batch = EVEN_KINDS[name].make(), packed_batch([make_documents(LENGTHS)], 60)
    expected = run(module, batch)
    plan = even_plan_of(module, batch, 16)
    shapes = StaticShapes()

    def reference_attention(*args, kind, starts_K):
        shapes.paused = True
        out = parallel_attention(*args, starts_K=starts_K, kind="reference")
        shapes.paused = False
        assert starts_K.tolist() == [0, *np.cumsum(args[-1])]
        return out

    monkeypatch.setattr(parallel_draft, "parallel_attention", reference_attention)
    module.zero_grad()
    inputs = {name: tensor for name, tensor in batch.items() if name not in PACKING_FIELDS}
    with shapes:
        out = module.score(
            module.prepare_inputs(**inputs, plan=with_tensors(plan, tensors_of(plan)))
        )
        out.loss.backward()
    assert_same(expected, (out, {n: p.grad for n, p in module.draft_model.named_parameters()}))


READ = pytest.mark.parametrize("name", ["eagle3 ce", "peagle kl", "dflash", "dspark"])


@READ
def test_padding_is_not_read(name):
    """Changing the features of padding slots changes nothing."""
    module, batch = KINDS[name].make(), padded_batch(KINDS[name].documents([9, 14]), width=20)
    expected = run(module, batch)
    padding = batch["attention_mask"] == 0
    assert padding.any()
    changed = batch | {"aux_hidden_states": batch["aux_hidden_states"] + 9.0 * padding[..., None]}
    assert_same(expected, run_evenly(module, changed, 16))


@READ
def test_sizes_are_exact_in_evaluation(name):
    module, batch = KINDS[name].make(), padded_batch(KINDS[name].documents(LENGTHS))
    module.draft_model.eval()
    assert even_plan_of(module, batch, 64).head.real_N is None


def test_which_objectives_support_round_sizes():
    for name, kind in KINDS.items():
        assert kind.make().can_be_even is (name in EVEN_KINDS), name
    ranks = ContextRanks(rank=0, size=2, group=None)
    assert not peagle(context=ranks).can_be_even
    assert not eagle3(context=ranks).can_be_even
    assert not eagle3(depth_keep=0.5).can_be_even


@pytest.mark.parametrize(
    ("module", "tokens", "quantum"),
    [
        (peagle, 4096, 256),
        (peagle, 64, 16),
        (lambda: dflash(anchors=512), 16_384, 128),  # of 4,096 blocks
        (lambda: dflash(anchors=512), 64, 8),
        (lambda: dflash(anchors=10**6), 16_384, 512),
    ],
)
def test_the_quantum_is_small(module, tokens, quantum):
    assert module().quantum_for(tokens, sizes=16) == quantum
