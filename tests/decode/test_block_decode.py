"""DFlash and DSpark decode losslessly, propose what a naive block does, and replay predicts it."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from decode import test_sampling
from decode.pretend import PretendPasses
from decode.tiny_decode import (
    AUX,
    STOPS,
    check_lossless,
    check_replay,
    fit_on_own_texts,
    make_target,
)
from fledge.decode import speculative
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.strategy import DraftShape, choose
from fledge.methods.block.decoding import Block, MarkovBlock
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.objective import DFlashTrainerModule, DSparkTrainerModule
from fledge.target.hf.model import HFEagle3TargetModel
from objective.naive_block import block_states
from objective.naive_eagle3 import Document

pytestmark = pytest.mark.slow

SPARK = {"sample_from_anchor": True, "markov_rank": 6, "confidence_head": True, "block_size": 4}


def make_block(target, *, fit=0, seed=1, width=None, **options):
    torch.manual_seed(seed)
    vocab = target.config.vocab_size
    settings = {"block_size": 5, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, mask_token_id=vocab - 1,
        num_aux_hidden_states=3, aux_layer_ids=AUX, draft_vocab_size=width or vocab,
        **(settings | options),
    )  # fmt: skip
    draft = BlockDraftModel(config).double()
    if width:
        draft.set_vocab_mapping(torch.randperm(vocab)[:width].sort().values)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.3 if "markov" in name or "confidence" in name else 0.16)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    draft.copy_head_from_target(target.lm_head)
    if fit:
        fit_draft(target, draft, fit)
    return draft.eval()


def fit_draft(target, draft, steps):
    ids = draft.selected_token_ids
    mask = torch.zeros(40, dtype=torch.bool).index_fill(0, ids, True)
    kind = DSparkTrainerModule if draft.config.markov_rank else DFlashTrainerModule

    def module_of(head):
        return kind(
            draft, selected_token_ids=ids, selected_token_mask=mask, target_head=head, anchors=1024
        )

    backend = HFEagle3TargetModel(target, AUX, supervision="hidden")
    fit_on_own_texts(target, draft, backend, module_of, steps)


@pytest.fixture(scope="module")
def blocks(target):
    sliding = {"sliding_layers": [0], "sliding_window": 6}
    spark = make_block(target, fit=30, **SPARK)
    sure = copy.deepcopy(spark)
    sure.config.confidence_threshold = 0.3
    return {
        "random": make_block(target, width=30),
        "trained": make_block(target, fit=30),
        "causal": make_block(target, causal=True, fit=30, **sliding),
        "spark": spark,
        "sure": sure,
    }


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ["random", "trained", "causal", "spark", "sure"])
def test_output_matches_plain_greedy_decoding(target, blocks, asked, answers, kind, batch):
    decoder = SpeculativeDecoder(target, blocks[kind], num_draft_tokens=4)
    count = (200 if kind in ("trained", "spark") else 40) if batch == 8 else 12
    check_lossless(decoder, asked[:count], answers, batch=batch, accepts=kind != "random")


@pytest.mark.parametrize("kind", ["random", "trained", "causal", "spark", "sure"])
@pytest.mark.parametrize("count", [2, 4])
def test_replay_matches_live_rounds(target, blocks, asked, kind, count):
    live = SpeculativeDecoder(target, blocks[kind], num_draft_tokens=count)
    with HFEagle3TargetModel(target, AUX, supervision="hidden") as backend:
        replayed = check_replay(backend, live, asked[:60], batch_tokens=64)
    assert sum(len(text.rounds) for text in replayed) > 60


@pytest.mark.parametrize("kind", ["random", "trained", "causal", "spark"])
def test_proposals_match_the_textbook_block(target, blocks, monkeypatch, kind):
    """Compare every proposed token of every round, for rows of different lengths, with a block
    computed in plain loops."""
    draft = blocks[kind]
    strategy = MarkovBlock if kind == "spark" else Block
    assert choose(draft) is strategy
    proposals, propose = [], strategy.propose
    monkeypatch.setattr(
        strategy,
        "propose",
        lambda self, state, chooser: (
            proposals.append(propose(self, state, chooser)) or proposals[-1]
        ),
    )
    prompts = [[5, 9, 1], [7], [2, 2, 8, 30, 4]]
    decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
    after_rounds = []
    decoder.generate(prompts, STOPS, on_round=lambda texts: after_rounds.append(
        [(list(t.token_ids), t.finish) for t in texts]))  # fmt: skip
    before_rounds = [[(g, None) for g in first_tokens(target, prompts)], *after_rounds]
    compared = 0
    for proposal, before in zip(proposals, before_rounds, strict=False):
        unfinished = [row for row, (_, finish) in enumerate(before) if finish is None]
        for tokens, row in zip(proposal.token_BN.tolist(), unfinished, strict=True):
            text = [*prompts[row], *before[row][0]]
            assert tokens == textbook_tokens(target, draft, text), (row, text)
            compared += 1
    assert compared > 10


def first_tokens(target, prompts):
    with torch.no_grad():
        return [[int(target(torch.tensor([p])).logits[0, -1].argmax())] for p in prompts]


@torch.no_grad()
def textbook_tokens(target, draft, text):
    """The tokens proposed after `text`, whose last token the target has not read yet."""
    states = {}
    hooks = [
        target.model.layers[i].register_forward_hook(
            lambda _module, _args, out, i=i: states.__setitem__(i, out)
        )
        for i in AUX
    ]
    target(torch.tensor([text[:-1]]))
    for hook in hooks:
        hook.remove()
    layer_outputs = [out[0] if isinstance(out, tuple) else out for _, out in sorted(states.items())]
    aux = torch.cat([out[0] for out in layer_outputs], -1)
    document = Document(torch.tensor(text), None, aux, None)
    out = block_states(draft, document, len(text) - 1)
    selected, newest, tokens = draft.selected_token_ids, text[-1], []
    for k in range(draft.spec.first_place, draft.config.block_size):
        logits = draft.lm_head.weight @ out[k]
        if draft.token_head is not None:
            p = dict(draft.named_parameters())
            features = p["markov_head.markov_w1.weight"][newest]
            logits = logits + p["markov_head.markov_w2.weight"] @ features
        newest = int(selected[logits.argmax()])
        tokens.append(newest)
    return tokens


def test_a_confidence_threshold_drops_unlikely_tokens(target, blocks, asked):
    draft = blocks["spark"]
    by_threshold = {}
    for threshold in (0.0, 0.3, 0.999):
        draft.config.confidence_threshold = threshold
        decoder = SpeculativeDecoder(target, draft, num_draft_tokens=4)
        by_threshold[threshold] = decoder.generate(asked[:20], STOPS)
    draft.config.confidence_threshold = 0.0
    texts = [[text.token_ids for text in generations] for generations in by_threshold.values()]
    assert texts[0] == texts[1] == texts[2]
    lengths = [
        sum(r.accepted for text in generations for r in text.rounds)
        for generations in by_threshold.values()
    ]
    assert lengths[0] >= lengths[1] > lengths[2]


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dspark with a threshold"])
def test_texts_follow_the_targets_distribution(kind):
    target = make_target(vocab=test_sampling.VOCAB, sharp=0.35, seed=4)
    options = SPARK if "dspark" in kind else {}
    threshold = {"confidence_threshold": 0.45} if "threshold" in kind else {}
    draft = make_block(target, width=4, seed=5, **options, **threshold)
    if threshold:
        projection = draft.confidence_head.proj
        with torch.no_grad():
            projection.bias.fill_(0.4)
    values = [test_sampling.p_value(target, draft, None, seed) for seed in (0, 1)]
    assert max(values) > 0.05
    assert min(values) > 0.001


def test_recorded_passes_give_the_same_output(target, blocks, asked, answers, monkeypatch):
    """As on a GPU: shapes are fixed, and positions that were not accepted hold garbage."""
    monkeypatch.setattr(speculative, "Passes", PretendPasses)
    for kind in ("trained", "spark", "causal"):
        decoder = SpeculativeDecoder(target, blocks[kind], num_draft_tokens=4)
        generations = decoder.generate(asked[:24], STOPS)
        assert [(text.token_ids, text.finish) for text in generations] == answers[:24]
        assert {name for name, _ in decoder.passes.learned} == {"propose", "verify"}


def test_a_draft_without_its_targets_tables_is_rejected(target):
    draft = make_block(target)
    bare = BlockDraftModel(draft.config).double()
    with pytest.raises(ValueError, match="its target's embedding and head"):
        SpeculativeDecoder(target, bare).generate([[1, 2]], STOPS)
    assert Block(draft, DraftShape(99)).count == draft.drafts
