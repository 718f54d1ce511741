"""The same on a GPU: every method says what the target says, and replay agrees."""

import copy

import pytest
import torch
from tiny_decode import AUX, STOPS

from fledge.decode.replay import Text, replay
from fledge.decode.speculative import SpeculativeDecoder
from fledge.decode.tree import TreeShape
from fledge.target.hf import HFEagle3TargetModel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("kind", "method"), [("trained", "chain"), ("deep", "tree"), ("parallel", "parallel")]
)
def test_a_gpu_says_what_the_cpu_says(target, drafts, asked, answers, kind, method):
    model, draft = copy.deepcopy(target).cuda(), copy.deepcopy(drafts[kind]).cuda()
    decoder = SpeculativeDecoder(
        model, draft, aux_layer_ids=AUX, method=method, num_draft_tokens=4,
        tree=TreeShape(depth=4, width=3, nodes=9),
    )  # fmt: skip
    found = decoder.generate(asked[:32], STOPS, measure=True)
    assert [(one.token_ids, one.finish) for one in found] == answers[:32]
    assert decoder.timing.draft_s > 0
    if method != "tree":
        backend = HFEagle3TargetModel(model, AUX, supervision="hidden")
        texts = [Text(one.prompt_ids, one.token_ids) for one in found]
        replayed = replay(backend, draft, texts, num_draft_tokens=4, method=method)
        assert [one.rounds for one in replayed] == [one.rounds for one in found]
    drawn = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    again = decoder.generate(asked[:8], STOPS, temperature=1.0, seed=3)
    assert [one.token_ids for one in drawn] == [one.token_ids for one in again]
