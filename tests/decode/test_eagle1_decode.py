"""EAGLE-1 and EAGLE-2 drafts decode losslessly, and replay predicts every round."""

import pytest
import torch
from transformers import LlamaConfig

from decode.tiny_decode import STOPS, check_lossless, check_replay, fit_on_own_texts, random_prompts
from fledge.core.errors import BadInput
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.strategy import TreeShape, choose
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle1.objective import Eagle1TrainerModule
from fledge.target.hf.model import HFEagle3TargetModel

TREE = TreeShape(depth=4, width=3, nodes=9)


def make_eagle1(target, *, layers=1, version=1, fit=0):
    torch.manual_seed(1)
    vocab = target.config.vocab_size
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        eagle_version=version, num_aux_hidden_states=1,
    )  # fmt: skip
    draft = LlamaEagle1DraftModel(config).double()
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim == 2:
                weight.mul_(8)
    draft.copy_embeddings_from_target(target.model.embed_tokens)
    draft.copy_head_from_target(target.lm_head)
    if fit:
        fit_draft(target, draft, fit)
    return draft.eval()


def fit_draft(target, draft, steps):
    def module_of(head):
        return Eagle1TrainerModule(
            draft, selected_token_ids=torch.arange(40),
            selected_token_mask=torch.ones(40, dtype=torch.bool), target_head=head,
            token_weight=1.0,
        )  # fmt: skip

    fit_on_own_texts(target, draft, backend_of(target), module_of, steps)


def backend_of(target):
    return HFEagle3TargetModel(target, supervision="hidden", num_aux_layers=1)


@pytest.fixture(scope="module")
def eagle1(target):
    return {
        "random": make_eagle1(target),
        "trained": make_eagle1(target, fit=60),
        "deep": make_eagle1(target, layers=2, fit=60),
    }


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("method", ["chain", "tree"])
@pytest.mark.parametrize("kind", ["random", "trained", "deep"])
def test_output_matches_plain_greedy_decoding(target, eagle1, asked, answers, kind, method, batch):
    decoder = SpeculativeDecoder(target, eagle1[kind], num_draft_tokens=4, method=method, tree=TREE)
    count = (200 if kind == "trained" else 64) if batch == 8 else 12
    check_lossless(decoder, asked[:count], answers, batch=batch, accepts=kind != "random")


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("kind", ["random", "trained", "deep"])
def test_replay_matches_live_rounds(target, eagle1, asked, kind, depth):
    live = SpeculativeDecoder(target, eagle1[kind], num_draft_tokens=depth)
    with backend_of(target) as backend:
        check_replay(backend, live, asked[:40])


def test_eagle2_drafts_trees_by_default(target):
    draft = make_eagle1(target, version=2)
    assert choose(draft).drafted == "tree"
    assert choose(draft, "chain").drafted == "chain"
    with pytest.raises(BadInput, match="not trained for parallel"):
        choose(draft, "parallel")
    decoder = SpeculativeDecoder(target, draft, tree=TREE)
    prompts = random_prompts(4)
    plain = SpeculativeDecoder(target).generate(prompts, STOPS)
    generations = decoder.generate(prompts, STOPS)
    assert [text.token_ids for text in generations] == [text.token_ids for text in plain]
