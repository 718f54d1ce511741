"""Features only: a forward pass that stops after the last aux layer."""

import sys

import pytest
import torch
from contract import assert_same, packed_rows, some_documents
from tiny_models import ARCHITECTURES, tiny_model

from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import find_layers
from fledge.training.step import train_step


@pytest.fixture
def rows():
    return TokenBatch(*packed_rows(some_documents(), 14))


def layers_run(model, ask):
    """Call `ask`; return its answer and the set of decoder layers that ran."""
    ran = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, i=i: ran.append(i))
        for i, layer in enumerate(find_layers(model))
    ]
    answer = ask()
    for hook in hooks:
        hook.remove()
    return answer, set(ran)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_features_equal_those_of_a_full_pass_and_run_fewer_layers(architecture, rows):
    model = tiny_model(architecture)
    target = HFEagle3TargetModel(model, [0, 1], supervision="hidden", num_aux_layers=2)
    depth = len(find_layers(model))
    want, layers_of_answer = layers_run(model, lambda: target.answer(rows))
    got, layers_of_features = layers_run(model, lambda: target.features(rows))
    assert torch.equal(got.aux_hidden_states, want.aux_hidden_states)
    assert layers_of_answer == set(range(depth))
    assert layers_of_features == {0, 1}
    assert not got.last_hidden_states.any()
    assert_same(target.answer(rows), want)


def test_a_pass_that_stops_early_leaves_no_tensors_in_its_frames(rows):
    """An exception ends the pass, and its traceback refers to every frame it passed through."""
    model, frames = tiny_model("llama"), []
    target = HFEagle3TargetModel(model, [0, 1], supervision="hidden", num_aux_layers=2)
    target.features(rows)
    layer = find_layers(model)[1]
    forward = layer.forward

    def watched(hidden, *args, **options):
        frames.append(sys._getframe(1))  # torch's frame, which holds the layer's inputs
        return forward(hidden, *args, **options)

    layer.forward = watched
    target.features(rows)
    assert frames
    for frame in frames:
        assert not any(isinstance(value, torch.Tensor) for value in frame.f_locals.values())
        assert "args" not in frame.f_locals


@pytest.mark.parametrize("case", ["logits", "last layer", "last state"])
def test_a_target_that_cannot_stop_early_runs_a_full_pass(case, rows):
    model = tiny_model("llama")
    depth = len(find_layers(model))
    ids = {"last layer": [0, depth - 1], "last state": [depth]}.get(case, [0, 1])
    supervision = "logits" if case == "logits" else "hidden"
    target = HFEagle3TargetModel(model, ids, supervision=supervision, num_aux_layers=len(ids))
    want = target.answer(rows)
    assert_same(target.features(rows), want)


def test_other_backends_return_a_full_answer(rows):
    """Targets outside this process send everything they have."""
    target = HFEagle3TargetModel(
        tiny_model("llama"), [0, 1], supervision="hidden", num_aux_layers=2
    )
    assert_same(Eagle3TargetBackend.features(target, rows), target.answer(rows))


def test_a_step_with_the_text_loss_needs_only_features(monkeypatch):
    """DFlash with the loss `text`: the same weights from features and from answers, bitwise."""
    case, steps, weights = Case(shape="tiny", kind="dflash", seq=96, batch=2, documents=30), 3, []
    for stops in (True, False):
        torch.manual_seed(0)
        parts, stop_flags = build_parts(case, torch.device("cpu")), []
        whole = parts.target.answer

        def answer(rows, parts=parts, stop_flags=stop_flags, whole=whole):
            stop_flags.append(parts.target._stop)
            return whole(rows)

        monkeypatch.setattr(parts.target, "answer", answer)
        if not stops:
            monkeypatch.setattr(parts.target, "features", answer)
        for batch in build_batches(case, steps):
            train_step(parts, batch, lr=1e-3)
        assert stop_flags == [stops] * steps
        weights.append(parts.parameters)
    assert all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
