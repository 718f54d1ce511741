"""Faults that only decoding shows: wrong settings, labels, estimates, no acceptance."""

import json

import numpy as np
import pytest
import torch
from test_diagnose_faults import (
    assert_same_files,
    broken_copy,
    errors_and_warnings,
    put,
    rope_dropped,
)

from export.drafts import (
    AUX,
    NEW_TOKENS,
    PROMPTS,
    answered_rows,
    fit_draft,
    make_draft,
)
from export.layouts import write_as
from fledge.formats.checks import probe
from fledge.formats.diagnose import write_repaired
from fledge.measure.figures import every_slot_length
from fledge.measure.replay import Text, replay
from fledge.methods.shared.rotary import Rotary
from fledge.target.hf.model import HFEagle3TargetModel

pytestmark = pytest.mark.slow


def shifted(by):
    return put(aux_layer_ids=[layer + by for layer in AUX])


def shifted_ids(config, tensors):
    section = config.get("eagle_config", config)
    ids = section["eagle_aux_hidden_state_layer_ids"]
    section["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in ids]


def both_wrong(config, tensors):
    shifted(1)(config, tensors)
    config["norm_output"] = False


ERROR, ROPE = "error", {"rope": "warning", "rope-measured": "error"}
# kind, layout, fault, what is found; the repair restores the healthy files
MEASURED = [
    *((kind, "fledge", shifted(by), {"aux-shifted": ERROR})
      for kind in ("eagle3", "eagle31", "peagle") for by in (-1, 1)),
    ("eagle3", "speculators", shifted_ids, {"aux-shifted": ERROR}),
    ("eagle3", "modelopt", shifted_ids, {"aux-shifted": ERROR}),
    ("eagle31", "fledge", put(norm_output=False), {"norm-output": ERROR}),
    ("eagle31", "fledge", both_wrong, {"aux-shifted": ERROR, "norm-output": ERROR}),
    ("eagle31", "specforge", rope_dropped, ROPE),
    ("eagle1", "eagle1-vllm", rope_dropped, ROPE),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "layout", "break_", "found"), MEASURED)
def test_a_wrong_setting_is_measured_and_repaired(
    place, made, tmp_path, look, kind, layout, break_, found
):
    healthy = made(kind)
    if layout != "fledge":
        healthy = write_as(layout, healthy, tmp_path / "healthy", place / "target")
    diagnosis = look(broken_copy(healthy, tmp_path / "broken", break_))
    assert errors_and_warnings(diagnosis) == found
    if "aux-shifted" in found:
        errors = " ".join(error.evidence for error in diagnosis.of("error"))
        assert f"; with the outputs of {AUX}" in errors
    before, after = diagnosis.score.acceptance, diagnosis.repaired_score.acceptance
    assert before.length < after.length
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), healthy)


def test_standard_errors_by_hand():
    lower, higher = (probe.Score(np.array(x), None) for x in ([0, 0, 1, 2], [1, 0, 3, 2]))
    assert lower.errors_below(higher, 4) == pytest.approx(0.75 / (np.std([1, 0, 2, 0]) / 2))
    assert lower.errors_below(higher, 1) == pytest.approx(0.25 / (np.std([1, 0, 0, 0]) / 2))
    assert lower.errors_below(lower, 4) == 0.0


def test_a_normed_residual_missing_from_the_config(place, tmp_path, look):
    draft = make_draft(place / "target", norm_before_residual=True, fc_scale=4)
    draft.save_pretrained(tmp_path / "healthy")
    assert look(tmp_path / "healthy").healthy
    change = put(norm_before_residual=False)
    diagnosis = look(broken_copy(tmp_path / "healthy", tmp_path / "broken", change))
    assert errors_and_warnings(diagnosis) == {"norm-residual": "error"}
    assert_same_files(write_repaired(diagnosis, tmp_path / "repaired"), tmp_path / "healthy")


def test_different_rotary_settings_used_in_training_are_left_alone(place, tmp_path, look):
    """A foreign draft that was really trained without the scaling gets a warning, no repair."""
    draft = make_draft(place / "target", fit=0)
    draft.config.rope_parameters = {"rope_type": "default", "rope_theta": 100.0}
    draft.config.rope_scaling = None
    draft.rotary = Rotary(draft.config)
    backend = HFEagle3TargetModel.from_pretrained(place / "target", aux_layer_ids=AUX, device="cpu")
    rows = answered_rows(backend)
    fit_draft(draft, backend, rows, draft.selected_token_ids, draft.t2d, steps=30)
    draft.save_pretrained(tmp_path / "ours")
    foreign = write_as("specforge", tmp_path / "ours", tmp_path / "foreign", place / "target")
    diagnosis = look(foreign)
    assert errors_and_warnings(diagnosis) == {"rope": "warning"}
    assert diagnosis.repaired is None


def test_an_estimate_that_decoding_does_not_confirm(place, tmp_path, look):
    draft = tmp_path / "draft"
    make_draft(place / "target", fit=8).save_pretrained(draft)
    healthy = look(draft)
    assert 0.1 < healthy.score.first < 0.7
    state = {"step": 5, "last": {"prefix_acceptance": [healthy.score.first + 0.2, 0.3]}}
    (draft / "state.json").write_text(json.dumps(state))
    assert look(draft).healthy
    state["last"]["prefix_acceptance"][0] = 0.98
    (draft / "state.json").write_text(json.dumps(state))
    diagnosis = look(draft)
    assert errors_and_warnings(diagnosis) == {"acceptance": "warning"}
    assert "98.0%" in diagnosis.of("warning")[0].evidence


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_a_draft_that_accepts_nothing(made, tmp_path, look, kind):
    torch.manual_seed(5)

    def break_(config, tensors):
        for name in ("fc.weight", "layers.0.mlp.down_proj.weight"):
            tensors[name] = torch.randn_like(tensors[name]) * 3

    diagnosis = look(broken_copy(made(kind), tmp_path / "draft", break_))
    assert errors_and_warnings(diagnosis) == {"acceptance": "error"}
    assert "labels or masks" in diagnosis.of("error")[0].fix


def test_decoding_uses_the_repaired_files(place, tmp_path, look):
    """With a fault in the files, decoding measures the repaired files."""
    broken = broken_copy(place / "eagle3", tmp_path / "draft", put(num_hidden_layers=8))
    healthy = look(place / "eagle3")
    diagnosis = look(broken)
    assert not diagnosis.skipped
    assert diagnosis.score.acceptance == healthy.score.acceptance


def test_a_score_counts_every_slot_of_the_answers(place, answering):
    """Checked against `figures`: 1 + the sum over depths of P(all tokens so far accepted)."""
    loaded = answering(None)
    draft = make_draft(place / "target", fit=5)
    score = loaded.score(loaded.backend(AUX), draft)
    texts = [Text(turn.prompt_ids, turn.answer_ids) for turn in loaded.answers]
    samples = replay(loaded.backend(AUX), draft, texts, num_draft_tokens=4)
    assert len(score.accepted_S) == sum(len(turn_text.answer_ids) - 1 for turn_text in texts)
    assert 1 + score.first == pytest.approx(every_slot_length(samples, 1))
    assert len(texts) == PROMPTS
    assert all(len(turn_text.answer_ids) == NEW_TOKENS for turn_text in texts)
