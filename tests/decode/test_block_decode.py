"""DFlash and DSpark propose what a naive block does, and drop what they are not sure of."""

import pytest
import torch

from decode.tiny_decode import AUX, STOPS, make_block
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.strategy import DraftShape, choose
from fledge.methods.block.decoding import Block, StepBlock
from fledge.methods.block.draft import BlockDraftModel
from objective.naive_block import block_states
from objective.naive_eagle3 import Document

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["dflash random", "dflash trained", "dflash causal", "dspark"])
def test_proposals_match_the_textbook_block(target, draft_of, monkeypatch, kind):
    """Compare every proposed token of every round, for rows of different lengths, with a block
    computed in plain loops."""
    draft = draft_of(kind)
    strategy = StepBlock if kind == "dspark" else Block
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


def test_a_confidence_threshold_drops_unlikely_tokens(target, draft_of, asked):
    draft = draft_of("dspark")
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


def test_a_draft_without_its_targets_tables_is_rejected(target):
    draft = make_block(target)
    bare = BlockDraftModel(draft.config).double()
    with pytest.raises(ValueError, match="its target's embedding and head"):
        SpeculativeDecoder(target, bare).generate([[1, 2]], STOPS)
    assert Block(draft, DraftShape(99)).count == draft.spec.drafts
