"""Refitting a draft to a changed target: a linear change costs no draft anything."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig

from decode.tiny_decode import AUX, make_draft, make_target
from fledge.core.errors import BadInput
from fledge.measure.replay import Text, as_pack
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.eagle1.draft import LlamaEagle1DraftModel
from fledge.methods.eagle3.method import EAGLE3
from fledge.methods.registry import METHODS
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.training.refit import Targets, acceptance_length, reading_of, refit, take_tables


@pytest.fixture(scope="module")
def target():
    return make_target()


@pytest.fixture(scope="module")
def drafts(target):
    return {
        "trained": make_draft(target, width=32, fit=12),
        "normed": make_draft(target, norm_output=True, fc_norm=True, fit=12),
        "parallel": make_draft(target, layers=2, width=36, parallel=True, fit=12),
    }


@pytest.fixture(scope="module")
def texts(target):
    """The target's own greedy answers to random prompts."""
    prompts = torch.randint(0, 39, (90, 5), generator=torch.Generator().manual_seed(0))
    rows = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=12, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    ).tolist()  # fmt: skip
    return [Text(row[:5], row[5:]) for row in rows]


class Changed(HFEagle3TargetModel):
    """The same target with linearly transformed states."""

    change_DD: torch.Tensor

    def answer(self, rows):
        batch = super().answer(rows)
        return replace(batch, aux_hidden_states=batch.aux_hidden_states @ self.change_DD.t())


def pair(model, aux_layer_ids, change_DD):
    options = {"supervision": "hidden", "num_aux_layers": len(aux_layer_ids)}
    new = Changed(model, aux_layer_ids, **options)
    new.change_DD = change_DD
    return Targets(HFEagle3TargetModel(model, aux_layer_ids, **options), new)


def random_change(size):
    return torch.eye(size).double() + 0.3 * torch.randn(size, size).double()


def rotation(layers, size=16):
    """A rotation of each layer's states, which keeps their norms."""
    return torch.block_diag(
        *(torch.linalg.qr(torch.randn(size, size).double()).Q for _ in range(layers))
    )


@pytest.fixture(scope="module")
def packs(texts):
    """Packs to (fit, judge, hold out)."""
    return [as_pack(texts[:40])], [as_pack(texts[40:55])], [as_pack(texts[55:])]


def config_of(model, **options):
    return LlamaConfig(
        vocab_size=model.config.vocab_size, hidden_size=16, intermediate_size=24,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, target_hidden_size=16, **options,
    )  # fmt: skip


def block_draft(model, borrowed_target):
    torch.manual_seed(5)
    draft = BlockDraftModel(
        config_of(model, block_size=4, num_aux_hidden_states=3, mask_token_id=39)
    ).double()
    draft.borrow_from(borrowed_target)
    return draft


@pytest.mark.parametrize("name", ["trained", "normed", "parallel", "block"])
def test_a_linear_change_is_undone(target, drafts, packs, name):
    """`normed` normalizes each layer's states; `parallel` has a placeholder of its own."""
    torch.manual_seed(0)
    fitted, judged, held_out = packs
    change_DD = rotation(3) if name == "normed" else random_change(48)
    targets = pair(target, AUX, change_DD)
    draft = block_draft(target, targets.old) if name == "block" else copy.deepcopy(drafts[name])
    with torch.no_grad():
        before = draft.project_hidden_states(targets.old.answer(held_out[0]).aux_hidden_states)
    placeholder = draft.masked_projected_hidden() if name == "parallel" else None
    unfitted = copy.deepcopy(draft)
    result = refit(draft, targets, fitted=fitted, judged=judged)
    with torch.no_grad():
        after = draft.project_hidden_states(targets.new.answer(held_out[0]).aux_hidden_states)
    assert float((after - before).norm()) < 1e-5 * float(before.norm())
    if placeholder is not None:
        torch.testing.assert_close(draft.masked_projected_hidden(), placeholder)
    refitted = acceptance_length(draft, targets.new, held_out, 3)
    assert acceptance_length(unfitted, targets.old, held_out, 3) == refitted
    if name != "block":  # which is random: next to nothing is accepted
        assert acceptance_length(unfitted, targets.new, held_out, 3) != refitted
    assert result.error < 1e-5 < 0.1 < result.error_before


def test_a_draft_that_reads_its_own_states_is_fitted_to_old_and_new_ones(target, packs):
    """EAGLE-1: only the state half of fc changes, and it reads the old states better than a map
    that is fitted to the new ones alone."""
    torch.manual_seed(0)
    draft = LlamaEagle1DraftModel(
        config_of(target, eagle_version=1, num_aux_hidden_states=1, draft_vocab_size=40)
    ).double()
    targets, new_only = pair(target, [3], random_change(16)), copy.deepcopy(draft)
    token_EE, state_EE = draft.fc.weight.detach().clone().chunk(2, dim=1)
    old_ND = targets.old.answer(packs[2][0]).aux_hidden_states[0]
    new_ND = old_ND @ targets.new.change_DD.t()

    @torch.no_grad()
    def error(model, states_ND):
        read_EE = model.fc.weight.chunk(2, dim=1)[1]
        return float((states_ND @ read_EE.t() - old_ND @ state_EE.t()).norm())

    before = error(draft, new_ND)
    refit(draft, targets, fitted=packs[0], judged=packs[1])
    assert torch.equal(draft.fc.weight.chunk(2, dim=1)[0], token_EE)
    assert error(draft, new_ND) < 0.8 * before
    with pytest.MonkeyPatch.context() as patch:
        forward = replace(METHODS["eagle1"].reading(new_only), feeds_back=False)
        patch.setattr(METHODS["eagle1"], "reading", lambda _: forward, raising=False)
        refit(new_only, targets, fitted=packs[0], judged=packs[1])
    assert error(new_only, new_ND) < error(draft, new_ND)
    assert error(draft, old_ND) < error(new_only, old_ND)


def test_an_unchanged_target_changes_nothing(target, drafts, packs):
    draft = copy.deepcopy(drafts["trained"])
    targets = pair(target, AUX, torch.eye(48).double())
    result = refit(draft, targets, fitted=packs[0], judged=packs[1])
    assert result.error_before == 0.0
    assert torch.equal(draft.fc.weight, drafts["trained"].fc.weight)


def test_streaming_does_not_change_the_refit(target, drafts, texts):
    """Text by text gives the same refit as one pack."""
    torch.manual_seed(0)
    targets, judged = pair(target, AUX, random_change(48)), [as_pack(texts[50:])]
    whole, streamed = copy.deepcopy(drafts["trained"]), copy.deepcopy(drafts["trained"])
    refit(whole, targets, fitted=[as_pack(texts[:50])], judged=judged)
    one_by_one = (as_pack([text]) for text in texts[:50])
    refit(streamed, targets, fitted=one_by_one, judged=judged)
    aux_BTD = targets.new.answer(judged[0]).aux_hidden_states
    expected, actual = (
        draft.project_hidden_states(aux_BTD).detach() for draft in (whole, streamed)
    )
    assert float((expected - actual).norm()) < 1e-6 * float(expected.norm())


def test_untrained_tables_follow_the_target(target, drafts):
    """The embedding was not trained and is replaced; the head was trained and stays."""
    tuned = copy.deepcopy(target)
    with torch.no_grad():
        tuned.model.embed_tokens.weight.add_(0.1)
    options = {"supervision": "hidden"}
    targets = Targets(
        HFEagle3TargetModel(target, AUX, **options), HFEagle3TargetModel(tuned, AUX, **options)
    )
    draft = make_draft(target, width=25)
    head = draft.lm_head.weight.detach().clone()
    assert take_tables(draft, targets) == ("embedding",)
    assert torch.equal(draft.embed_tokens.weight, tuned.model.embed_tokens.weight)
    assert torch.equal(draft.lm_head.weight, head)
    trained = copy.deepcopy(drafts["trained"])  # embeddings and all
    assert take_tables(trained, targets) == ()
    borrowed = block_draft(target, targets.old)
    assert take_tables(borrowed, targets) == ("embedding", "head")
    assert borrowed.embed_tokens.weight.data_ptr() == tuned.model.embed_tokens.weight.data_ptr()
    from_files = BlockDraftModel(borrowed.config)
    assert take_tables(from_files, targets) == ()


def test_a_method_without_one_linear_map_is_refused_in_one_line(drafts, monkeypatch):
    monkeypatch.setattr(type(EAGLE3), "reading", lambda *_: None)
    with pytest.raises(BadInput, match=r"EAGLE-3 does not read its target by one linear map.*init"):
        reading_of(drafts["trained"], where="d")
