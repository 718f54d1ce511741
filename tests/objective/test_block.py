"""The DFlash and DSpark objectives against textbook versions, and the equalities they promise."""

import pytest
import torch

from fledge.core.distributed import World
from fledge.core.head import TargetHead
from fledge.methods.block.plan import ANCHOR_TOKENS
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.registry import LOSSES
from fledge.rollout.slots import RowMasks
from objective.cases import (
    KINDS,
    LENGTHS,
    SEED,
    assert_matches_textbook,
    dflash,
    dspark,
    reduced_block_draft,
    run,
)
from objective.cases import block_head as make_head
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


def sampled_anchors(module, documents, seed=SEED):
    """Where the blocks of each document start, with every document planned alone."""
    starts = []
    for document in documents:
        batch = padded_batch([document])
        plan = module.plan(RowMasks(batch["loss_mask"], batch["attention_mask"]), seed)
        starts.append([slot + 1 for slot in plan.slot_T[plan.blocks.slot_N].tolist()])
    return starts


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


TEXTBOOK = {
    **{name: ({"changes": changes}, by_text) for name, changes in VARIANTS.items()},
    **{name: ({"loss": name}, by_target(LOSSES[name]()))
       for name in ("ce", "kl", "reverse_kl", "js", "hard", "lk_alpha", "tv")},
    "dpace": ({"weights": "dpace"}, by_text),
}  # fmt: skip


@pytest.mark.parametrize("name", TEXTBOOK)
def test_dflash_matches_the_textbook(name):
    """Lengths from 1 to 21: blocks at document ends, and blocks that reach past them."""
    options, row_loss = TEXTBOOK[name]
    module, documents = dflash(**options), make_block_documents(LENGTHS)
    naive = naive_dflash(
        module.draft_model, documents, sampled_anchors(module, documents), head=make_head(),
        row_loss=row_loss, gamma=None if name == "dpace" else 3.0,
    )  # fmt: skip
    assert_matches_textbook(module, run(module, padded_batch(documents)), naive)
    assert min(naive.charged) > 0


@pytest.mark.parametrize("variant", ["plain", "causal", "blocks of 7"])
def test_dspark_matches_the_textbook(variant):
    weights = {"text": 0.3, "distance": 0.8, "confidence": 0.6}
    options = {f"{name}_weight": value for name, value in weights.items()}
    draft = make_spark_draft(**VARIANTS[variant])
    module = dspark(draft, **options)
    documents = make_block_documents(LENGTHS, supervised=0.85)
    starts = sampled_anchors(module, documents)
    naive = naive_dspark(draft, documents, starts, head=make_head(), gamma=3.0, **weights)
    assert_matches_textbook(module, run(module, padded_batch(documents)), naive)
    assert min(naive.charged) > 0


def test_anchors_depend_on_the_document_and_the_seed_only():
    module = dflash(anchors=ANCHOR_TOKENS // 4)
    documents = make_block_documents([40, 7, 64], supervised=0.9)
    for document, starts in zip(documents, sampled_anchors(module, documents), strict=True):
        allowed = candidates(document)
        assert len(starts) == min(len(allowed), -(-len(document.ids) // 4))
        assert starts == sorted(set(starts))
        assert set(starts) <= set(allowed)
    assert sampled_anchors(module, documents) == sampled_anchors(module, documents)
    assert sampled_anchors(module, documents, seed=1) != sampled_anchors(module, documents, seed=2)
    exhaustive = dflash(anchors=ANCHOR_TOKENS)
    assert sampled_anchors(exhaustive, documents) == [
        candidates(document) for document in documents
    ]
    counts = dict.fromkeys(candidates(documents[0]), 0)
    for seed in range(400):
        for anchor in sampled_anchors(module, documents[:1], seed)[0]:
            counts[anchor] += 1
    mean = sum(counts.values()) / len(counts)
    assert all(abs(count - mean) < 5 * mean**0.5 for count in counts.values())


@pytest.mark.parametrize("kind", ["dflash", "dflash kl"])
def test_a_reduced_vocabulary_charges_only_tokens_in_it(kind):
    module = KINDS[kind].make(reduced_block_draft())
    documents = make_block_documents([30, 25], supervised=1.1)
    out, _ = run(module, padded_batch(documents))
    full = KINDS[kind].make()(**padded_batch(documents), seed=SEED)
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


@pytest.mark.parametrize("options", [{"weights": "dpace"}, {"loss": LkLambda()}])
def test_totals_under_autocast_are_those_of_its_dtype(options):
    """A step in several micro-batches under torch.autocast is one with that compute_dtype."""
    documents = make_block_documents(LENGTHS, dtype=torch.float32)
    micro_batches = [padded_batch(documents[:2]), packed_batch([documents[:1:-1]], 60)]

    def step(compute_dtype, *, autocast):
        module = dflash(dtype=torch.float32, compute_dtype=compute_dtype, **options)
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
            dflash(**options)
    with pytest.raises(ValueError, match="without a token head"):
        dspark(make_block_draft())
    with pytest.raises(ValueError, match="learns from the distance"):
        dspark(distance_weight=0.0)
