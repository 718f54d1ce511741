"""Recorded steps train as others do."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.objective.losses.total_variation import TotalVariation
from fledge.recipe.sections import Training
from fledge.target.finite import Verdict
from fledge.target.hf import compiled
from fledge.train.average import Average
from fledge.train.optimizer import make_optimizers
from fledge.train.recorded import RecordedSteps
from fledge.train.step import train_step

CASE = Case(shape="tiny", seq=96, documents=20, depths=4, batch=2)
# method, and what its objective is made to be
KINDS = {
    "eagle3": ("eagle3", {}),
    "dflash": ("dflash", {}),
    "dflash by distance": ("dflash", {"loss": TotalVariation()}),
    "dflash dpace": ("dflash", {"weights": "dpace"}),
    "dspark": ("dspark", {}),
    "peagle": ("peagle", {}),
}


class PretendPass:
    """Rehearsed; then runs on inputs that all passes share, into results that stay where they are
    until any of them runs."""

    made = 0  # of passes, updates aside
    held: ClassVar[dict] = {}

    def __init__(self, run, inputs, *, common):
        PretendPass.made += "lr" not in inputs
        self._run = run
        self._inputs = {name: self.place(name, tensor) for name, tensor in inputs.items()}
        self._output = run(**self._inputs)

    def place(self, name, tensor):
        return self.held.setdefault((name, tensor.shape), tensor.clone()).copy_(tensor)

    def __call__(self, inputs):
        for name, tensor in inputs.items():
            assert tensor.shape == self._inputs[name].shape
            self._inputs[name].copy_(tensor)
        output = self._run(**self._inputs)
        for held, new in zip(tensors_of(self._output), tensors_of(output), strict=True):
            held.copy_(new)
        return self._output


def tensors_of(results):
    return results if isinstance(results, tuple) else vars(results).values()


@pytest.fixture
def pretend(monkeypatch):
    monkeypatch.setattr(compiled, "RecordedPass", PretendPass)
    monkeypatch.setattr(compiled, "CommonMemory", object)
    monkeypatch.setattr(PretendPass, "made", 0)
    monkeypatch.setattr(PretendPass, "held", {})


def trained(kind, batches, *, quantum, muon=False):
    torch.manual_seed(0)
    method, changes = KINDS[kind]
    parts = build_parts(replace(CASE, kind=method), torch.device("cpu"))
    parts.objective.attention = "reference"  # as a kernel, it walks over no blocks
    for name, value in changes.items():
        setattr(parts.objective, name, value)
    if quantum:
        parts.objective.quantum = quantum
        parts.recorded = RecordedSteps(parts.objective, parts.parameters)
    if muon:
        with_muon(parts)
    results = [train_step(parts, batch, lr=1e-3) for batch in batches]
    return parts, results


@pytest.mark.parametrize("quantum", [8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_are_the_steps(pretend, kind, quantum):
    batches = build_batches(CASE, 6)
    plainly, wanted = trained(kind, batches, quantum=0)
    ours, found = trained(kind, batches, quantum=quantum)
    assert 0 < PretendPass.made < len(batches)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.grad_norm, theirs.grad_norm, rtol=1e-4, atol=1e-6)
        for name, value in vars(theirs.sums).items():
            close = (
                {"rtol": 1e-4, "atol": 1e-5}
                if value.is_floating_point()
                else {"rtol": 0, "atol": 0}
            )
            torch.testing.assert_close(vars(mine.sums)[name], value, **close)
    fresh = trained(kind, [], quantum=0)[0].parameters
    for mine, theirs, start in zip(ours.parameters, plainly.parameters, fresh, strict=True):
        moved = (theirs - start).norm()  # AdamW makes much of roundings where a gradient is nothing
        assert moved > 0
        assert (mine - theirs).norm() < 1e-3 * moved


def with_muon(parts):
    """And with an average, and with weights that decay."""
    training = Training(optimizer="muon", weight_decay=0.1, lr=1e-3)
    parts.optimizers = make_optimizers(parts.objective.draft_model, training)
    parts.average = Average(parts.parameters, 0.9)


@pytest.mark.parametrize("bad", [None, 2, 4])
def test_recorded_updates_are_the_updates(pretend, bad, monkeypatch):
    """Of one that is rehearsed nothing is seen; a step that is broken is skipped in both."""
    batches = build_batches(CASE, 7)

    def run(*, record):
        parts, _ = trained("eagle3", [], quantum=8, muon=True)
        parts.clip = 0.01
        parts.recorded._updates = 0 if record else -len(batches)
        found = []
        for index, batch in enumerate(batches):
            monkeypatch.setattr(Verdict, "broken", torch.tensor(index == bad))
            found.append(train_step(parts, batch, lr=1e-3 / (1 + index)))
        return parts, found

    ours, found = run(record=True)
    assert ours.recorded._update is not None
    assert [bool(one.bad) for one in found] == [index == bad for index in range(len(batches))]
    plainly, wanted = run(record=False)
    assert plainly.recorded._update is None
    for mine, theirs in zip(found, wanted, strict=True):
        assert torch.equal(mine.grad_norm, theirs.grad_norm)
        assert torch.equal(mine.bad_in_a_row, theirs.bad_in_a_row)
        assert torch.equal(mine.flags.read(), theirs.flags.read())
    assert torch.equal(ours.guard.norms.nan_to_num(), plainly.guard.norms.nan_to_num())
    for mine, theirs in zip(
        (*ours.parameters, *ours.average.aside),
        (*plainly.parameters, *plainly.average.aside),
        strict=True,
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_target_is_asked_for_no_more_than_is_read(pretend, kind, monkeypatch):
    asked = []
    parts, _ = trained(kind, [], quantum=8)
    for name in ("answer", "features"):
        ask = getattr(parts.target, name)
        monkeypatch.setattr(
            parts.target, name, lambda rows, ask=ask, name=name: asked.append(name) or ask(rows)
        )
    train_step(parts, build_batches(CASE, 1)[0], lr=1e-3)
    assert asked[0] == ("features" if kind == "dflash" else "answer")
