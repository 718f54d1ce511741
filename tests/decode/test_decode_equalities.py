"""Every family and strategy: the text is the target's own, and replay takes the live rounds."""

from dataclasses import replace

import pytest

from decode.test_speculative import TREE
from decode.tiny_decode import (
    HEADS,
    STOPS,
    backend_of,
    check_replay,
    decode,
    make_draft,
    make_eagle1,
    outcomes,
)
from fledge.core.errors import BadInput
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.strategy import choose, rollouts_of
from fledge.decode.tree import Tree
from fledge.methods.eagle3.decoding import Chain
from fledge.methods.peagle.decoding import Parallel
from fledge.methods.registry import METHODS

pytestmark = pytest.mark.slow

KINDS = {  # of drafts, by method
    "eagle3": ["random", "trained", "deep", "normed", "biased"],
    "peagle": ["parallel"],
    "eagle1": ["eagle1 random", "eagle1 trained", "eagle1 deep"],
    "mtp": ["mtp random", "mtp trained"],
    "dflash": ["dflash random", "dflash trained", "dflash causal"],
    "dspark": ["dspark", "dspark sure"],
    **{kind: [kind] for kind in HEADS},
}
WAYS = [
    (kind, way) for method in KINDS for kind in KINDS[method] for way in METHODS[method].strategies
]
REPLAYED = [
    (kind, way)
    for method in KINDS
    for kind in KINDS[method]
    for way, strategy in METHODS[method].strategies.items()
    if strategy.rollouts is not None
]


@pytest.mark.parametrize(("kind", "method"), WAYS)
def test_texts_are_the_targets_own(target, draft_of, asked, answers, kind, method):
    draft, accepts = draft_of(kind), "random" not in kind
    aux_layer_ids = backend_of(target, draft).aux_layer_ids
    decoder = SpeculativeDecoder(
        target, draft, aux_layer_ids=aux_layer_ids, num_draft_tokens=4, method=method, tree=TREE
    )
    together = decode(decoder, asked[: 200 if "trained" in kind else 100], batch=8)
    assert outcomes(together) == answers[: len(together)]
    for text in together:
        assert sum(r.emitted for r in text.rounds) == len(text.token_ids) - 1
        assert all(r.accepted <= r.emitted <= r.accepted + 1 for r in text.rounds)
    accepted = [r.accepted for text in together for r in text.rounds]
    assert not accepts or (max(accepted) >= 2 and min(accepted) == 0)
    alone = decode(decoder, asked[:16], batch=1)
    assert outcomes(alone) == answers[:16]
    assert [text.rounds for text in alone] == [text.rounds for text in together[:16]]


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize(("kind", "method"), REPLAYED)
def test_replay_matches_live_rounds(target, draft_of, asked, kind, method, depth):
    draft = draft_of(kind)
    with backend_of(target, draft) as backend:
        live = SpeculativeDecoder(
            target, draft, aux_layer_ids=backend.aux_layer_ids, num_draft_tokens=depth,
            method=method,
        )  # fmt: skip
        rounds = check_replay(backend, live, asked[:40])
    assert "random" in kind or max(r.accepted for r in rounds) >= min(depth, 2)


def test_a_draft_has_the_strategies_of_its_method(target, drafts, asked, answers):
    eagle2 = make_eagle1(target, version=2)
    unmasked = make_draft(target, parallel=True)
    unmasked.spec = replace(unmasked.spec, mask_token_id=None)
    assert (choose(eagle2), choose(eagle2, "chain")) == (Tree, Chain)
    assert (choose(drafts["trained"]), choose(drafts["parallel"])) == (Chain, Parallel)
    assert choose(drafts["parallel"], "tree") is Tree
    for draft in (eagle2, drafts["trained"], unmasked):
        with pytest.raises(BadInput, match=r"not trained for parallel drafting; use \w+ or"):
            choose(draft, "parallel")
    with pytest.raises(BadInput, match="no strategy is named 'trees'; did you mean 'tree'"):
        choose(eagle2, "trees")
    with pytest.raises(BadInput, match="cannot be replayed"):
        rollouts_of(drafts["trained"], 3, name="tree")
    decoder = SpeculativeDecoder(target, eagle2, tree=TREE)
    assert outcomes(decoder.generate(asked[:4], STOPS)) == answers[:4]
