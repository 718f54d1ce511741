"""The objectives of Domino, XPress, DFlash 2 and LiLiCorr against textbook versions."""

import pytest
import torch

from fledge.methods.losses.registry import LOSSES
from objective.cases import LENGTHS, assert_matches_textbook, dflash2, domino, lilicorr, run, xpress
from objective.cases import block_head as make_head
from objective.naive_block import make_block_documents
from objective.naive_eagle3 import packed_batch, padded_batch
from objective.naive_heads import naive_dflash2, naive_domino, naive_lilicorr, naive_xpress
from objective.test_block import sampled_anchors

GAMMA = 3.0
SLIDING = {"sliding_layers": [0, 1], "sliding_window": 4, "sliding_both_ways": True}


def check(module, naive, *, supervised=0.85, **options):
    """In padded rows and in packs, of lengths from 1 to 21."""
    documents = make_block_documents(LENGTHS, supervised=supervised)
    starts = sampled_anchors(module, documents)
    for batch in (padded_batch(documents), packed_batch([documents[:4], documents[4:]], 40)):
        want = naive(module.draft_model, documents, starts, gamma=GAMMA, **options)
        assert_matches_textbook(module, run(module, batch), want)
        assert min(want.charged) > 0


@pytest.mark.parametrize("progress", [0.0, 0.25, 1.0])
@pytest.mark.parametrize(
    "changes",
    [{}, {"sample_from_anchor": False}, {"block_size": 7, "pure_draft_prefix_len": 2}],
)
def test_domino(changes, progress):
    module = domino(changes=changes, plain_weight=0.5, plain_share=0.5)
    module.begin_step(progress)
    check(module, naive_domino, plain_weight=0.5 * max(0.0, 1 - progress / 0.5))


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("changes", [{}, {"block_size": 6, "causal": True}])
def test_xpress(changes, rounds):
    weights = {"rounds": rounds, "round_weight": 0.3, "plain_weight": 0.6}
    check(xpress(changes=changes, **weights), naive_xpress, head=make_head(), **weights)


@pytest.mark.parametrize("missing", ["replace", "skip"])
@pytest.mark.parametrize("changes", [{}, SLIDING, {"block_size": 7}, {"conv_kernel_size": 3}])
def test_dflash2(changes, missing):
    weights = {"missing": missing, "selector_weight": 0.7}
    check(dflash2(changes=changes, **weights), naive_dflash2, head=make_head(), **weights)


@pytest.mark.parametrize("missing", ["replace", "skip"])
def test_dflash2_with_the_targets_distribution(missing):
    weights, loss = {"missing": missing, "selector_weight": 0.7}, LOSSES["kl"]()
    module = dflash2(loss=loss, **weights)
    check(module, naive_dflash2, head=make_head(), by_target=loss, **weights)


@pytest.mark.parametrize(
    "changes", [{}, {"conv_kernel_size": 2}, {"block_size": 3, "lilicorr_hidden_size": 8}]
)
def test_lilicorr(changes):
    weights = {"pair_weight": 0.4, "target_weight": 0.3}
    module = lilicorr(changes=changes, **weights)
    check(module, naive_lilicorr, head=make_head(), supervised=0.95, **weights)


def test_new_heads_change_no_logits():
    """A draft that starts from a DFlash draft drafts as that did, whatever its head."""
    for make in (domino, xpress, dflash2):
        draft = make(changes={"new": True}).draft_model
        token = draft.token_head
        assert token is None or not token.out_WR.any()
        if draft.candidate_head is not None:
            assert not draft.candidate_head.successor_codebook.any()
            conv = draft.layers[0].attention_conv
            x = torch.randn(2, 4, draft.spec.hidden_size, dtype=torch.float64)
            read, gates = conv.enter(x)
            assert torch.equal(read, x)
            assert torch.equal(conv.leave(x, gates), x)
