"""A third-party drafting method: no attention, no cache, two tokens at once, any number of layers.

Neither the decoder nor replay has code for it, and it is as lossless as the built-in ones.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from decode.pretend import PretendPasses
from decode.tiny_decode import AUX, STOPS, check_replay, make_draft
from fledge.core.errors import BadInput
from fledge.decode import speculative
from fledge.decode.accept import Proposal
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.strategy import Rollouts, Strategy, choose, rollouts_of
from fledge.decode.tree import Tree
from fledge.methods.eagle3.decoding import Chain
from fledge.methods.eagle3.method import Eagle3
from fledge.methods.peagle.decoding import Parallel
from fledge.methods.registry import METHODS
from fledge.methods.shared.draft import DraftModel
from fledge.target.hf.model import HFEagle3TargetModel


class PairDraft(DraftModel):
    """Drafts two tokens from the target's states at one token and the token after it."""

    architecture = "PairDraft"

    def __init__(self, config):
        super().__init__(config)
        size, aux = config.hidden_size, config.num_aux_hidden_states * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.mix = nn.Linear(aux + size, 2 * size, bias=False)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self._register_vocabulary(self.spec)

    def states(self, aux, token):
        """[..., 2, E]"""
        features = torch.cat([aux, self.embed_tokens(token)], -1)
        return torch.tanh(self.mix(features)).unflatten(-1, (2, -1))


class PairRollouts(Rollouts):
    def unroll(self, aux_TD, ids_T, plan):
        state_T2E = self.draft.states(aux_TD, ids_T)
        return [state_T2E[rows.slot_N, depth] for depth, rows in enumerate(plan.depths)]


class Pair(Strategy):
    drafted, label, count = "pair", "a pair of tokens", 2
    rollouts = PairRollouts

    def propose(self, state, chooser):
        rows_B, last_B = torch.arange(len(state.count_B)), state.count_B - 1
        state_B2E = self.draft.states(state.aux_BQD[rows_B, last_B], state.token_BQ[rows_B, last_B])
        picked_B2, probs_B2W = chooser.pick(self.draft.lm_head(state_B2E))
        return Proposal(self.selected_W[picked_B2], probs_BNW=probs_B2W)


class PairMethod(Eagle3):
    name, title, strategies = "pair", "Pair", {"pair": Pair}

    def owns(self, config):
        return getattr(config, "pair", False)

    def draft_type(self):
        return PairDraft


@pytest.fixture(autouse=True)
def register_pair():
    METHODS.add("pair", PairMethod())
    yield
    METHODS.remove("pair")


@pytest.fixture(scope="module")
def backend(target):
    return HFEagle3TargetModel(target, AUX, supervision="hidden")


def make_pair(target, layers, prompts):
    """A draft fitted to the target's next tokens on its own texts."""
    torch.manual_seed(1)
    vocab = target.config.vocab_size
    draft = PairDraft(
        LlamaConfig(
            vocab_size=vocab, draft_vocab_size=vocab, hidden_size=16, target_hidden_size=16,
            num_aux_hidden_states=layers, num_attention_heads=4, pair=True,
            aux_layer_ids=list(range(layers)),
        )
    ).double()  # fmt: skip
    ids = target.generate(
        torch.tensor([prompt[:1] * 4 for prompt in prompts]), max_new_tokens=16, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.no_grad():
        hidden = target(ids, output_hidden_states=True).hidden_states
    aux = torch.cat([hidden[i + 1] for i in range(layers)], -1)[:, :-3]
    labels = torch.stack([ids[:, 2:-1], ids[:, 3:]], -1)
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-2)
    for _ in range(60):
        optimizer.zero_grad()
        logits = draft.lm_head(draft.states(aux, ids[:, 1:-2]))
        nn.functional.cross_entropy(logits.flatten(0, 2), labels.flatten()).backward()
        optimizer.step()
    return draft.eval()


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("recorded", [False, True])
def test_output_matches_plain_greedy_decoding(
    target, asked, answers, layers, recorded, monkeypatch
):
    if recorded:
        monkeypatch.setattr(speculative, "Passes", PretendPasses)
    decoder = SpeculativeDecoder(target, make_pair(target, layers, asked[:16]))
    assert decoder.method == "pair"
    assert decoder.target.aux_layer_ids == list(range(layers))
    generations = decoder.generate(asked[:32], STOPS)
    assert [(text.token_ids, text.finish) for text in generations] == answers[:32]
    assert {r.accepted for text in generations for r in text.rounds} == {0, 1, 2}
    if recorded:
        assert {name for name, _ in decoder.passes.learned} == {"propose", "verify"}
    sampled = decoder.generate(asked[:4], STOPS, temperature=1.0, seed=1)
    assert all(text.finish is not None for text in sampled)


def test_replay_matches_live_rounds(target, backend, asked):
    draft = make_pair(target, 3, asked[:16])
    live = SpeculativeDecoder(target, draft, aux_layer_ids=AUX)
    check_replay(backend, live, asked[:24])


def test_a_draft_has_the_strategies_of_its_method(target, drafts, asked):
    pair = make_pair(target, 1, asked[:4])
    assert choose(pair) is Pair
    assert choose(drafts["trained"]) is Chain
    assert choose(drafts["parallel"]) is Parallel
    assert choose(drafts["parallel"], "tree") is Tree
    with pytest.raises(BadInput, match="no drafting method 'pairs'; did you mean 'pair'"):
        choose(pair, "pairs")
    with pytest.raises(BadInput, match="not trained for chain drafting; use pair"):
        choose(pair, "chain")
    with pytest.raises(BadInput, match="not trained for pair drafting; use chain or tree"):
        choose(drafts["trained"], "pair")
    with pytest.raises(BadInput, match="not trained for parallel drafting; use chain or tree"):
        choose(drafts["trained"], "parallel")
    unmasked = make_draft(target, parallel=True)
    unmasked.spec = replace(unmasked.spec, mask_token_id=None)
    with pytest.raises(BadInput, match="not trained for parallel drafting; use chain or tree"):
        choose(unmasked, "parallel")
    with pytest.raises(BadInput, match="cannot be replayed"):
        rollouts_of(drafts["trained"], 3, name="tree")
