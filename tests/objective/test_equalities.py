"""What every objective promises: how a batch is laid out, cut and computed changes nothing."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fledge import simulated_accept_length
from fledge.core.distributed import World, join_world
from fledge.methods.losses.registry import LOSSES
from objective.cases import COUNTS, KINDS, LENGTHS, SEED, assert_same, backward, run
from objective.naive_eagle3 import (
    check_autocast,
    make_head,
    masks_of,
    packed_batch,
    padded_batch,
    vocabulary,
    with_logits,
    with_probs,
)
from ranks import run_ranks

ALL_KINDS = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FEW = ("eagle3 ce", "peagle kl", "peagle, three segments", "dflash", "dflash kl", "dspark")
FEW_KINDS = pytest.mark.parametrize("kind", [KINDS[name] for name in FEW], ids=FEW)


def left_padded(documents):
    """Rolling a right-padded row to the right makes it left-padded. The last row is all padding."""
    batch = padded_batch(documents, max(len(d.ids) for d in documents) + 2)
    batch = {n: F.pad(x, [0, 0] * (x.ndim - 1) + [0, 1]) for n, x in batch.items()}
    lengths = [*(len(d.ids) for d in documents), 0]
    left = {
        name: torch.stack([row.roll(len(row) - n, 0) for row, n in zip(x, lengths, strict=True)])
        for name, x in batch.items()
    }
    for row, length in enumerate(lengths[:-1]):
        left["loss_mask"][row, :-length] = 1  # the contents of padding must not matter
        left["aux_hidden_states"][row, :-length] = 9.0
    return left


@ALL_KINDS
def test_packed_equals_padded(kind):
    module, documents = kind.make(), kind.documents(LENGTHS)
    same = partial(assert_same, run(module, padded_batch(documents)), tolerance=kind.tolerance)
    same(run(module, packed_batch([documents[:3], documents[3:]], 50)))
    same(run(module, packed_batch([documents[::-1]], sum(LENGTHS))))
    same(run(module, packed_batch([[d] for d in documents], 23)))
    same(run(module, padded_batch(documents, width=40)))
    same(run(module, left_padded(documents)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.2, 0.6, 1.1]),
    name=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 999),
)
def test_packed_equals_padded_for_any_documents(rows, pad, supervised, name, seed):
    kind = KINDS[name]
    packs = [
        kind.documents(row, seed=seed + i, supervised=supervised) for i, row in enumerate(rows)
    ]
    packed = packed_batch(packs, max(sum(row) for row in rows) + pad)
    padded = padded_batch([document for pack in packs for document in pack])
    module = kind.make()
    results = (run(module, batch, seed=seed) for batch in (padded, packed))
    assert_same(*results, tolerance=kind.tolerance)


@ALL_KINDS
def test_micro_batches_add_up_to_one_batch(kind):
    """With one seed per step, a document's rollouts do not depend on how the step is split."""
    module, documents = kind.make(), kind.documents(LENGTHS)
    whole, whole_grads = run(module, packed_batch([documents], 60))
    one_by_one = [padded_batch([document]) for document in documents]
    halves = [padded_batch(documents[:2]), packed_batch([documents[:1:-1]], 60)]
    for micro_batches in (one_by_one, halves):
        ready = [module.prepare_inputs(**batch, seed=SEED) for batch in micro_batches]
        normalizer = sum(batch.charged_K for batch in ready)
        assert normalizer.tolist() == whole.charged.tolist()
        totals = module.totals(ready, World())
        module.zero_grad()
        outs = [module.score(batch, normalizer, totals) for batch in ready]
        total = sum(out.loss for out in outs)
        total.backward()
        torch.testing.assert_close(total, whole.loss, rtol=1e-11, atol=1e-12)
        for name, grad in whole_grads.items():
            got = module.draft_model.get_parameter(name).grad
            torch.testing.assert_close(got, grad, rtol=kind.tolerance * 10, atol=1e-11)
        for field in COUNTS:
            assert sum(getattr(o, field) for o in outs).tolist() == getattr(whole, field).tolist()


@ALL_KINDS
def test_how_it_is_computed_changes_nothing(kind):
    batch = packed_batch([kind.documents(LENGTHS)], 60)
    module = kind.make()
    whole = run(module, batch)
    for options in ({"attention": "reference"}, *({"chunk_rows": n} for n in (1, 7, 1000))):
        assert_same(whole, run(kind.make(**options), batch))
    plan = module.plan(masks_of(batch), SEED)
    planned = backward(module, module.score(module.prepare_inputs(**batch, plan=plan)))
    assert_same(whole, planned, tolerance=0)
    module.draft_model.gradient_checkpointing = True
    assert_same(whole, run(module, batch), tolerance=1e-13)


@pytest.mark.parametrize("name", ["eagle3 ce", "peagle kl"])
def test_encodings_agree_and_logits_equal_probs_bitwise(name):
    head, kind = make_head(torch.float32), KINDS[name]
    module = kind.make(dtype=torch.float32, target_head=head)
    hidden = padded_batch(kind.documents(LENGTHS, dtype=torch.float32))
    from_logits = run(module, with_logits(hidden, head))
    from_probs = run(module, with_probs(hidden, head, *vocabulary()))
    assert_same(from_logits, from_probs, tolerance=0)
    assert_same(from_logits, run(module, hidden), tolerance=2e-6)
    covered = with_probs(hidden, head, *vocabulary())["position_mask"].bool()  # a target remembers
    assert_same(run(module, hidden), run(module, hidden | {"covered": covered}), tolerance=0)
    nothing = module(**hidden, covered=torch.zeros_like(covered), seed=SEED)
    assert nothing.correct.sum() == 0


@ALL_KINDS
def test_a_batch_without_supervision_gives_zero_and_zero_gradients(kind):
    module = kind.make()
    for documents in (kind.documents(LENGTHS, supervised=-1), kind.documents([1, 1])):
        out, grads = run(module, padded_batch(documents))
        assert out.loss == 0
        assert all(bool((g == 0).all()) for g in grads.values())
        assert simulated_accept_length(out.step_prefix_hits, out.step_valid) == 1.0


@FEW_KINDS
def test_bf16_compute_trains_fp32_masters(kind):
    batch = padded_batch(kind.documents(LENGTHS, dtype=torch.float32))
    exact, grads = run(kind.make(dtype=torch.float32), batch)
    low, low_grads = run(kind.make(dtype=torch.float32, compute_dtype=torch.bfloat16), batch)
    assert low.loss.dtype == torch.float32
    torch.testing.assert_close(low.loss, exact.loss, rtol=0.03, atol=0.03)
    for name, grad in low_grads.items():
        assert grad.dtype == torch.float32
        assert F.cosine_similarity(grad.flatten(), grads[name].flatten(), dim=0) > 0.97, name


@FEW_KINDS
def test_autocast_sets_the_compute_dtype(kind):
    batch = padded_batch(kind.documents(LENGTHS, dtype=torch.float32))
    draft = kind.make(dtype=torch.float32).draft_model
    make = partial(kind.make, draft, dtype=torch.float32)
    check_autocast(lambda dtype: make(compute_dtype=dtype), batch, seed=SEED)


@pytest.mark.parametrize("name", ["peagle kl", "dflash"])
def test_without_a_seed_training_varies_and_evaluation_does_not(name):
    module, batch = KINDS[name].make(), padded_batch(KINDS[name].documents([40, 30]))
    torch.manual_seed(0)
    first, second = module(**batch).loss, module(**batch).loss
    assert first != second
    torch.manual_seed(0)
    assert module(**batch).loss == first
    module.draft_model.eval()  # as the training loop does
    before = torch.random.get_rng_state()
    with torch.no_grad():
        assert module(**batch).loss == module(**batch).loss
    assert torch.equal(before, torch.random.get_rng_state())


# --- figures of the whole step -------------------------------------------------------------------


def step_gradients(module, micro_batches, world):
    """A step's loss and gradients, computed as `train_step` does."""
    ready = [module.prepare_inputs(**batch, seed=SEED) for batch in micro_batches]
    normalizer = world.sum_(sum(batch.charged_K for batch in ready))
    totals = module.totals(ready, world)
    module.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in ready:
        output = module.score(batch, normalizer, totals)
        output.loss.backward()
        loss += output.loss.detach()
    parameters = list(module.draft_model.parameters())
    world.sum_gradients(parameters)
    return [world.sum_(loss), *(parameter.grad.clone() for parameter in parameters)]


def step_on_rank(kind):
    """Ranks with unequal work, one of them with a single micro-batch."""
    world = join_world(torch.device("cpu"))
    documents = KINDS[kind].documents(LENGTHS)
    batches = [padded_batch(documents[:3]), padded_batch(documents[3:5])]
    batches = batches if world.rank == 0 else [packed_batch([documents[5:]], 40)]
    return step_gradients(KINDS[kind].make(), batches, world)


@pytest.mark.parametrize("kind", ["eagle3 lambda", "peagle lambda", "dflash dpace", "dspark"])
def test_two_ranks_match_one(kind):
    batch = padded_batch(KINDS[kind].documents(LENGTHS))
    whole = step_gradients(KINDS[kind].make(), [batch], World())
    for actual, expected in zip(run_ranks(2, step_on_rank, kind)[0], whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def test_acceptance_per_micro_batch_would_differ():
    """Losses weighted by acceptance take its mean over the whole step, which is not that of a part;
    others need no extra pass."""
    documents = KINDS["eagle3 ce"].documents(LENGTHS)
    parts = [padded_batch(documents[:3]), padded_batch(documents[3:])]
    module = KINDS["eagle3 lambda"].make()
    whole = step_gradients(module, parts, World())
    module.totals = lambda ready, world: None
    assert (step_gradients(module, parts, World())[0] - whole[0]).abs() > 1e-4
    for name in LOSSES:
        module = KINDS["eagle3 ce"].make(loss=name)
        ready = [module.prepare_inputs(**batch) for batch in parts]
        assert (module.totals(ready, World()) is not None) == (name == "lk_lambda")
        assert module.totals(ready[:1], World()) is None
