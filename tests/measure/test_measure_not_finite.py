"""Replay with NaN or infinity: an error if they are the target's, a miss if the draft's."""

import pytest
import torch

from decode.tiny_decode import AUX, make_draft, make_target
from fledge.decode.strategy import rollouts_of
from fledge.measure.replay import (
    Text,
    accepted_lengths,
    as_pack,
    ask,
    drafted_tokens,
    replay,
    target_picks,
)
from fledge.target.finite_check import NotFinite
from fledge.target.hf.model import HFEagle3TargetModel

TEXT = Text([1, 2, 3], [0, 0, 0, 0, 0, 0])  # token 0 is what argmax over NaN returns


@pytest.fixture(scope="module")
def model():
    return make_target()


@pytest.fixture(scope="module")
def backend(model):
    return HFEagle3TargetModel(model, AUX, supervision="hidden")


@pytest.mark.parametrize("parallel", [False, True])
def test_a_draft_that_computes_nan_is_never_accepted(model, backend, parallel):
    draft = make_draft(model, parallel=parallel)
    rollouts, tokens = rollouts_of(draft, 4), as_pack([TEXT])
    batch = ask(backend, tokens)
    picks_S = target_picks(batch, tokens, backend.info().head, rollouts.selected_token_ids)
    for picks in (picks_S, picks_S * 0, picks_S * 0 - 1):
        batch.aux_hidden_states.fill_(float("nan"))
        assert (drafted_tokens(rollouts, torch.full((3, 16), float("nan")).double()) < -1).all()
        assert accepted_lengths(rollouts, batch, tokens, picks).sum() == 0


def test_a_target_that_overflows_is_refused(model):
    broken = make_target()
    broken.model.layers[1].mlp.up_proj.weight.data.mul_(1e300)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(1e300)
    assert all(weight.isfinite().all() for weight in broken.parameters())
    target = HFEagle3TargetModel(broken, AUX, supervision="hidden")
    with pytest.raises(NotFinite, match="not finite in layer 1, row 0, token 0"):
        replay(target, make_draft(model), [TEXT], num_draft_tokens=3)


def test_a_head_that_overflows_is_refused(model, backend):
    from dataclasses import replace

    tokens = as_pack([TEXT])
    head = backend.info().head
    broken = replace(head, weight_VD=head.weight_VD * 1e308 * 1e308)
    with pytest.raises(NotFinite, match="not finite in logits, row 0, token 3"):
        target_picks(ask(backend, tokens), tokens, broken, torch.arange(40))
