"""Features alone: a pass that ends behind the last aux layer."""

import sys

import pytest
import torch
from test_target_packing import packed_rows, some_documents
from tiny_models import ARCHITECTURES, tiny_model

from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.core.rows import TokenBatch
from fledge.target.base import Eagle3TargetBackend
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.layers import find_layers
from fledge.train.step import train_step


@pytest.fixture
def rows():
    return TokenBatch(*packed_rows(some_documents(), 14))


def layers_run(model, ask):
    """Which decoder layers a question runs."""
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
def test_the_states_of_a_whole_pass_without_its_end(architecture, rows):
    model = tiny_model(architecture)
    target = HFEagle3TargetModel(model, [0, 1], supervision="hidden", num_aux_layers=2)
    depth = len(find_layers(model))
    want, whole = layers_run(model, lambda: target.answer(rows))
    target.features(rows)  # the first one compares
    got, part = layers_run(model, lambda: target.features(rows))
    assert torch.equal(got.aux_hidden_states, want.aux_hidden_states)
    assert whole == set(range(depth))
    assert part == {0, 1}
    assert not got.last_hidden_states.any()
    again = target.answer(rows)
    assert torch.equal(again.last_hidden_states, want.last_hidden_states)
    assert torch.equal(again.aux_hidden_states, want.aux_hidden_states)


def test_a_pass_that_ends_early_leaves_nothing_in_its_frames(rows):
    """An exception ends it, whose traceback leads to every frame that it passed through."""
    model, frames = tiny_model("llama"), []
    target = HFEagle3TargetModel(model, [0, 1], supervision="hidden", num_aux_layers=2)
    target.features(rows)
    layer = find_layers(model)[1]
    forward = layer.forward

    def watched(hidden, *args, **options):
        frames.append(sys._getframe(1))  # torch's own, which holds what the layer was given
        return forward(hidden, *args, **options)

    layer.forward = watched
    target.features(rows)
    assert frames
    for frame in frames:
        assert not any(isinstance(value, torch.Tensor) for value in frame.f_locals.values())
        assert "args" not in frame.f_locals


@pytest.mark.parametrize("case", ["logits", "last layer", "last state", "refuses"])
def test_a_target_that_cannot_stop_answers(case, rows, monkeypatch):
    model = tiny_model("llama")
    depth = len(find_layers(model))
    ids = {"last layer": [0, depth - 1], "last state": [depth]}.get(case, [0, 1])
    supervision = "logits" if case == "logits" else "hidden"
    target = HFEagle3TargetModel(model, ids, supervision=supervision, num_aux_layers=len(ids))
    if case == "refuses":  # a model whose own code swallows or changes what ends a pass
        whole = target._captured

        def changed(*given, **options):
            if target._stop:
                raise RuntimeError("no way out")
            return whole(*given, **options)

        monkeypatch.setattr(target, "_captured", changed)
    want, got = target.answer(rows), target.features(rows)
    for (name, theirs), (_, ours) in zip(want.tensors(), got.tensors(), strict=True):
        assert torch.equal(ours, theirs), name


def test_other_targets_answer(rows):
    """What is not in this process sends all it has."""
    target = HFEagle3TargetModel(
        tiny_model("llama"), [0, 1], supervision="hidden", num_aux_layers=2
    )
    got = Eagle3TargetBackend.features(target, rows)
    assert torch.equal(got.last_hidden_states, target.answer(rows).last_hidden_states)


def test_a_step_by_the_text_needs_no_more(monkeypatch):
    """DFlash with the loss `text`: the same weights from features and from answers, bitwise."""
    case, steps, weights = Case(shape="tiny", kind="dflash", seq=96, batch=2, documents=30), 3, []
    for stops in (True, False):
        torch.manual_seed(0)
        parts, asked = build_parts(case, torch.device("cpu")), []
        whole = parts.target.answer

        def answer(rows, parts=parts, asked=asked, whole=whole):
            asked.append(parts.target._stop)
            return whole(rows)

        monkeypatch.setattr(parts.target, "answer", answer)
        if not stops:
            monkeypatch.setattr(parts.target, "features", answer)
        for batch in build_batches(case, steps):
            train_step(parts, batch, lr=1e-3)
        assert asked == [stops] * steps
        weights.append(parts.parameters)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*weights, strict=True))
