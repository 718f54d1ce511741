"""The DFlash and DSpark objectives against textbook versions, and the equalities they promise."""

import multiprocessing
import os
import socket

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fledge.core.distributed import World, join_world, leave_world
from fledge.core.head import TargetHead
from fledge.methods.block.objective import DFlashTrainerModule, DSparkTrainerModule
from fledge.methods.block.plan import ANCHOR_TOKENS
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.registry import LOSSES
from fledge.rollout.slots import RowMasks
from objective.naive_block import (
    Table,
    candidates,
    make_block_documents,
    make_block_draft,
    make_spark_draft,
    naive_dflash,
    naive_dspark,
)
from objective.naive_eagle3 import V, packed_batch, padded_batch

SEED = 11
LENGTHS = [9, 1, 2, 6, 3, 13, 21]
HALF = ANCHOR_TOKENS // 2  # blocks start at about half of all tokens


def make_head(dtype=torch.float64):
    return TargetHead(Table(V, dtype).weight)


def make_module(draft=None, *, kind=DFlashTrainerModule, dtype=torch.float64, **options):
    make = make_block_draft if kind is DFlashTrainerModule else make_spark_draft
    defaults = {"anchors": HALF, "gamma": 3.0, "target_head": make_head(dtype)}
    ids = torch.arange(V) if draft is None else draft.selected_token_ids
    mask = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return kind(
        draft if draft is not None else make(dtype=dtype),
        selected_token_ids=ids,
        selected_token_mask=mask,
        **(defaults | options),
    )


def run(module, batch, *, seed=SEED, **extra):
    return backward(module, module(**batch, seed=seed, **extra))


def backward(module, out):
    module.zero_grad()
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in module.draft_model.named_parameters()}


COUNTS = ("step_prefix_hits", "step_valid", "step_reached", "charged", "correct")


def assert_same(first, second, *, tolerance=1e-11):
    (out_a, grads_a), (out_b, grads_b) = first, second
    torch.testing.assert_close(out_a.loss, out_b.loss, rtol=tolerance, atol=tolerance)
    for name, grad in grads_a.items():
        torch.testing.assert_close(
            grad, grads_b[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )
    for field in COUNTS:
        assert getattr(out_a, field).tolist() == getattr(out_b, field).tolist(), field
    torch.testing.assert_close(out_a.loss_sums, out_b.loss_sums, rtol=tolerance, atol=tolerance)


def sampled_anchors(module, documents, seed=SEED):
    """Where the blocks of each document start, with every document planned alone."""
    starts = []
    for document in documents:
        batch = padded_batch([document])
        plan = module.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]), seed)
        starts.append([slot + 1 for slot in plan.slot_T[plan.blocks.slot_N].tolist()])
    return starts


def check(module, documents, naive):
    out, grads = run(module, padded_batch(documents))
    module.zero_grad()
    naive.loss.backward()
    torch.testing.assert_close(out.loss, naive.loss, rtol=1e-9, atol=1e-10)
    for name, parameter in module.draft_model.named_parameters():
        torch.testing.assert_close(
            grads[name], parameter.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m
        )
        assert parameter.grad.abs().max() > 0, name
    assert out.charged.tolist() == naive.charged
    assert out.correct.tolist() == naive.correct
    assert out.step_valid.tolist() == naive.valid
    assert out.step_prefix_hits.tolist() == naive.hits
    assert min(naive.charged) > 0


def by_text(logits, label, _probs):
    return -logits.log_softmax(-1)[label], int(logits.argmax()) == label


def by_target(loss):
    def row(logits, _label, probs):
        hit = int(logits.argmax()) == int(probs.argmax())
        return loss.definition(logits[None], probs[None])[0], hit

    return row


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "sliding": {"sliding_layers": [1], "sliding_window": 4},
    "blocks of 7": {"block_size": 7},
    "blocks of 2, no GQA": {"block_size": 2, "num_key_value_heads": 4},
    "three layers": {"num_hidden_layers": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_dflash_matches_the_textbook(variant):
    """Lengths from 1 to 21: blocks at document ends, and blocks that reach past them."""
    module = make_module(make_block_draft(**VARIANTS[variant]))
    documents = make_block_documents(LENGTHS)
    starts = sampled_anchors(module, documents)
    draft = module.draft_model
    naive = naive_dflash(draft, documents, starts, head=make_head(), row_loss=by_text, gamma=3.0)
    check(module, documents, naive)


@pytest.mark.parametrize("kind", ["ce", "kl", "reverse_kl", "js", "hard", "lk_alpha", "tv"])
def test_dflash_with_losses_on_the_target_distribution(kind):
    module = make_module(loss=kind)
    documents = make_block_documents(LENGTHS)
    row_loss = by_target(LOSSES[kind]())
    starts = sampled_anchors(module, documents)
    naive = naive_dflash(
        module.draft_model, documents, starts, head=make_head(), row_loss=row_loss, gamma=3.0
    )
    check(module, documents, naive)


def test_dflash_with_dpace():
    module = make_module(weights="dpace")
    documents = make_block_documents(LENGTHS)
    starts = sampled_anchors(module, documents)
    naive = naive_dflash(
        module.draft_model, documents, starts, head=make_head(), row_loss=by_text, gamma=None
    )
    check(module, documents, naive)


@pytest.mark.parametrize("variant", ["plain", "causal", "blocks of 7"])
def test_dspark_matches_the_textbook(variant):
    weights = {"text": 0.3, "distance": 0.8, "confidence": 0.6}
    options = {f"{name}_weight": value for name, value in weights.items()}
    draft = make_spark_draft(**VARIANTS[variant])
    module = make_module(draft, kind=DSparkTrainerModule, **options)
    documents = make_block_documents(LENGTHS, supervised=0.85)
    starts = sampled_anchors(module, documents)
    naive = naive_dspark(draft, documents, starts, head=make_head(), gamma=3.0, **weights)
    check(module, documents, naive)


KINDS = {
    "dflash": {},
    "dflash kl": {"loss": "kl"},
    "dflash dpace": {"weights": "dpace"},
    "dspark": {"kind": DSparkTrainerModule},
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_kind_chunk_size_and_checkpointing_change_nothing(kind):
    batch = packed_batch([make_block_documents(LENGTHS)], 60)
    module = make_module(**KINDS[kind])
    whole = run(module, batch)
    for options in ({"attention": "reference"}, {"chunk_rows": 1}, {"chunk_rows": 7}):
        assert_same(whole, run(make_module(**KINDS[kind], **options), batch))
    module.draft_model.gradient_checkpointing = True
    assert_same(whole, run(module, batch), tolerance=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_equals_padded(kind):
    module = make_module(**KINDS[kind])
    documents = make_block_documents(LENGTHS)
    padded = run(module, padded_batch(documents))
    assert_same(padded, run(module, packed_batch([documents[:3], documents[3:]], 50)))
    assert_same(padded, run(module, packed_batch([documents[::-1]], sum(LENGTHS))))
    assert_same(padded, run(module, packed_batch([[d] for d in documents], 23)))
    assert_same(padded, run(module, padded_batch(documents, width=40)))
    batch = padded_batch(documents, max(LENGTHS) + 1)
    left = {
        name: torch.stack([row.roll(len(row) - n, 0) for row, n in zip(x, LENGTHS, strict=True)])
        for name, x in batch.items()
    }
    assert_same(padded, run(module, left))


@settings(max_examples=10, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3),
    pad=st.integers(0, 3),
    supervised=st.sampled_from([0.3, 0.7, 1.1]),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 999),
)
def test_packed_equals_padded_for_any_documents(rows, pad, supervised, kind, seed):
    packs = [
        make_block_documents(row, seed=seed + i, supervised=supervised)
        for i, row in enumerate(rows)
    ]
    width = max(sum(row) for row in rows) + pad
    padded = padded_batch([document for pack in packs for document in pack])
    module = make_module(**KINDS[kind])
    assert_same(run(module, padded, seed=seed), run(module, packed_batch(packs, width), seed=seed))


@pytest.mark.parametrize("kind", [*KINDS, "dflash lk_lambda"])
def test_micro_batches_add_up_to_one_batch(kind):
    options = KINDS.get(kind, {"loss": LkLambda(scale=0.9, decay=1.5)})
    module = make_module(**options)
    documents = make_block_documents(LENGTHS)
    whole = run(module, packed_batch([documents], 60))
    one_by_one = [padded_batch([document]) for document in documents]
    halves = [padded_batch(documents[:2]), packed_batch([documents[:1:-1]], 60)]
    for micro_batches in (one_by_one, halves):
        ready = [module.prepare_inputs(**batch, seed=SEED) for batch in micro_batches]
        normalizer = sum(r.charged_K for r in ready)
        totals = module.totals(ready, World())
        module.zero_grad()
        outs = [module.score(r, normalizer, totals) for r in ready]
        total = sum(out.loss for out in outs)
        total.backward()
        torch.testing.assert_close(total, whole[0].loss, rtol=1e-11, atol=1e-12)
        for name, parameter in module.draft_model.named_parameters():
            torch.testing.assert_close(parameter.grad, whole[1][name], rtol=1e-10, atol=1e-12)
        for field in COUNTS:
            assert (
                sum(getattr(o, field) for o in outs).tolist() == getattr(whole[0], field).tolist()
            )


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


def rank_step(rank, port, kind, queue):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    world = join_world(torch.device("cpu"))
    documents = make_block_documents(LENGTHS)
    # ranks with unequal work, one of them with a single micro-batch
    rank_batches = [padded_batch(documents[:3]), padded_batch(documents[3:5])]
    rank_batches = rank_batches if rank == 0 else [packed_batch([documents[5:]], 40)]
    gradients = step_gradients(make_module(**KINDS[kind]), rank_batches, world)
    if rank == 0:
        queue.put([tensor.tolist() for tensor in gradients])
    leave_world(world)


@pytest.mark.parametrize("kind", ["dflash dpace", "dspark"])
def test_two_ranks_match_one(kind):
    whole = step_gradients(
        make_module(**KINDS[kind]), [padded_batch(make_block_documents(LENGTHS))], World()
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=rank_step, args=(r, port, kind, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    gradients = [torch.tensor(values, dtype=torch.float64) for values in queue.get(timeout=60)]
    for process in ranks:
        process.join(timeout=60)
        assert process.exitcode == 0
    for actual, expected in zip(gradients, whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-11)


def test_anchors_depend_on_the_document_and_the_seed_only():
    module = make_module(anchors=ANCHOR_TOKENS // 4)
    documents = make_block_documents([40, 7, 64], supervised=0.9)
    for document, starts in zip(documents, sampled_anchors(module, documents), strict=True):
        allowed = candidates(document)
        assert len(starts) == min(len(allowed), -(-len(document.ids) // 4))
        assert starts == sorted(set(starts))
        assert set(starts) <= set(allowed)
    assert sampled_anchors(module, documents) == sampled_anchors(module, documents)
    assert sampled_anchors(module, documents, seed=1) != sampled_anchors(module, documents, seed=2)
    exhaustive = make_module(anchors=ANCHOR_TOKENS)
    assert sampled_anchors(exhaustive, documents) == [
        candidates(document) for document in documents
    ]
    counts = dict.fromkeys(candidates(documents[0]), 0)
    for seed in range(400):
        for anchor in sampled_anchors(module, documents[:1], seed)[0]:
            counts[anchor] += 1
    mean = sum(counts.values()) / len(counts)
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts.values())


def test_without_a_seed_training_varies_and_evaluation_does_not():
    module, batch = make_module(), padded_batch(make_block_documents([40, 30]))
    torch.manual_seed(0)
    assert module(**batch).loss != module(**batch).loss
    module.draft_model.eval()
    with torch.no_grad():
        assert module(**batch).loss == module(**batch).loss


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_supervision_gives_zero_and_zero_gradients(kind):
    module = make_module(**KINDS[kind])
    for documents in (make_block_documents(LENGTHS, supervised=-1), make_block_documents([1, 1])):
        out, grads = run(module, padded_batch(documents))
        assert out.loss == 0
        assert all(bool((g == 0).all()) for g in grads.values())


@pytest.mark.parametrize("kind", ["dflash", "dflash kl"])
def test_a_reduced_vocabulary_charges_only_tokens_in_it(kind):
    ids = torch.arange(0, V, 2)
    draft = make_block_draft(draft_vocab_size=len(ids))
    draft.set_vocab_mapping(ids)
    draft.copy_head_from_target(Table(V, torch.float64))
    module = make_module(draft, **KINDS[kind])
    documents = make_block_documents([30, 25], supervised=1.1)
    out, _ = run(module, padded_batch(documents))
    full = make_module(**KINDS[kind])(**padded_batch(documents), seed=SEED)
    document_labels = [
        document.ids.tolist() if kind == "dflash" else
        [0, *make_head().logits(document.hidden).argmax(-1).tolist()]
        for document in documents
    ]  # fmt: skip
    starts = sampled_anchors(module, documents)
    expected = [
        sum(
            labels[anchor + 1 + k] % 2 == 0
            for labels, anchors, n in zip(document_labels, starts, (30, 25), strict=True)
            for anchor in anchors
            if anchor + 1 + k < n
        )
        for k in range(3)
    ]
    assert out.charged.tolist() == expected
    assert (out.charged < full.charged).all()


def test_bf16_compute_trains_fp32_masters():
    for kind in KINDS.values():
        documents = make_block_documents(LENGTHS, dtype=torch.float32)
        exact, grads = run(make_module(dtype=torch.float32, **kind), padded_batch(documents))
        module = make_module(dtype=torch.float32, compute_dtype=torch.bfloat16, **kind)
        out, low_precision = run(module, padded_batch(documents))
        torch.testing.assert_close(out.loss, exact.loss, rtol=0.03, atol=0.03)
        for name, grad in grads.items():
            assert low_precision[name].dtype == torch.float32
            assert torch.nn.functional.cosine_similarity(
                low_precision[name].flatten(), grad.flatten(), dim=0
            ) > 0.98, name  # fmt: skip


@pytest.mark.parametrize("options", [{"weights": "dpace"}, {"loss": LkLambda()}])
def test_totals_under_autocast_are_those_of_its_dtype(options):
    """A step in several micro-batches under torch.autocast is one with that compute_dtype."""
    documents = make_block_documents(LENGTHS, dtype=torch.float32)
    micro_batches = [padded_batch(documents[:2]), packed_batch([documents[:1:-1]], 60)]

    def step(compute_dtype, *, autocast):
        module = make_module(dtype=torch.float32, compute_dtype=compute_dtype, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            ready = [module.prepare_inputs(**batch, seed=SEED) for batch in micro_batches]
            totals = module.totals(ready, World())
            normalizer = sum(batch.charged_K for batch in ready)
            loss = sum(module.score(batch, normalizer, totals).loss for batch in ready)
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.draft_model.parameters())]

    low, full = (step(dtype, autocast=False) for dtype in (torch.bfloat16, torch.float32))
    assert not torch.equal(low[0], full[0])
    assert all(map(torch.equal, step(None, autocast=True), low))
    assert all(map(torch.equal, step(torch.float32, autocast=True), full))


def test_invalid_options_are_rejected():
    for options, complaint in (
        ({"weights": "dpace", "loss": "kl"}, "needs the loss 'text'"),
        ({"weights": "x"}, "'decay' or 'dpace'"),
        ({"anchors": 0}, "anchors: must be positive"),
        ({"gamma": 0.0}, "gamma: must be positive"),
        ({"target_head": TargetHead(Table(V, torch.float64).weight, softcap=3.0)}, "soft cap"),
    ):
        with pytest.raises(ValueError, match=complaint):
            make_module(**options)
    with pytest.raises(ValueError, match="without a token head"):
        make_module(make_block_draft(), kind=DSparkTrainerModule)
    with pytest.raises(ValueError, match="learns from the distance"):
        make_module(kind=DSparkTrainerModule, distance_weight=0.0)
