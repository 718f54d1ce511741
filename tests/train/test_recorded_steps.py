"""Recorded steps train exactly as unrecorded ones do."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from fledge.bench import train_step as train_step_module
from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.core import graphs
from fledge.methods.losses.total_variation import TotalVariation
from fledge.target.finite_check import Verdict
from fledge.training import recorded_steps as recorded_module
from fledge.training.optimizer import make_optimizers
from fledge.training.recorded_steps import RecordedSteps, recorded_steps
from fledge.training.step import train_step

CASE = Case(shape="tiny", seq=96, documents=20, depths=4, batch=2)
# the method, and the attributes that are set on its objective
KINDS = {
    "eagle3": ("eagle3", {}),
    "dflash": ("dflash", {}),
    "dflash by distance": ("dflash", {"loss": TotalVariation()}),
    "dflash dpace": ("dflash", {"weights": "dpace"}),
    "dspark": ("dspark", {}),
    "peagle": ("peagle", {}),
}


class PretendPass:
    """Stands in for a recorded pass: rehearses once, then runs on inputs that all passes share and
    writes into results that are overwritten by the next pass."""

    made = 0  # number of passes recorded, not counting updates
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
        for old, new in zip(tensors_of(self._output), tensors_of(output), strict=True):
            old.copy_(new)
        return self._output


def tensors_of(results):
    return results if isinstance(results, tuple) else vars(results).values()


@pytest.fixture
def pretend(monkeypatch):
    # float32 everywhere: in bfloat16, other sizes round differently
    monkeypatch.setattr(train_step_module, "multiplies_bfloat16", lambda _: False)
    monkeypatch.setattr(graphs, "RecordedPass", PretendPass)
    monkeypatch.setattr(graphs, "CommonMemory", object)
    monkeypatch.setattr(PretendPass, "made", 0)
    monkeypatch.setattr(PretendPass, "held", {})


def trained(kind, batches, *, quantum, muon=False):
    torch.manual_seed(0)
    method, changes = KINDS[kind]
    parts = build_parts(replace(CASE, kind=method), torch.device("cpu"))
    parts.objective.attention = "reference"  # like a kernel, it does not loop over blocks
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
def test_recorded_steps_match_plain_steps(pretend, kind, quantum):
    batches = build_batches(CASE, 6)
    plain, plain_results = trained(kind, batches, quantum=0)
    recorded, recorded_results = trained(kind, batches, quantum=quantum)
    assert 0 < PretendPass.made < len(batches)
    for actual, expected in zip(recorded_results, plain_results, strict=True):
        torch.testing.assert_close(actual.grad_norm, expected.grad_norm, rtol=1e-4, atol=1e-6)
        for name, value in vars(expected.sums).items():
            tolerance = (
                {"rtol": 1e-4, "atol": 1e-5}
                if value.is_floating_point()
                else {"rtol": 0, "atol": 0}
            )
            torch.testing.assert_close(vars(actual.sums)[name], value, **tolerance)
    fresh = trained(kind, [], quantum=0)[0].parameters
    for actual, expected, start in zip(recorded.parameters, plain.parameters, fresh, strict=True):
        # relative to the whole move: AdamW amplifies rounding where a gradient is almost zero
        moved = (expected - start).norm()
        assert moved > 0
        assert (actual - expected).norm() < 1e-3 * moved


def with_muon(parts):
    """Switch to Muon with weight decay."""
    draft = parts.objective.draft_model
    parts.optimizers = make_optimizers(draft, optimizer="muon", weight_decay=0.1, lr=1e-3)


@pytest.mark.parametrize("bad", [None, 2, 4])
def test_recorded_updates_match_plain_updates(pretend, bad, monkeypatch):
    """A rehearsal leaves no trace, and a bad step is skipped in both."""
    batches = build_batches(CASE, 7)

    def run(*, record):
        parts, _ = trained("eagle3", [], quantum=8, muon=True)
        parts.clip = 0.01
        parts.recorded._updates = 0 if record else -len(batches)
        results = []
        for index, batch in enumerate(batches):
            monkeypatch.setattr(Verdict, "broken", torch.tensor(index == bad))
            results.append(train_step(parts, batch, lr=1e-3 / (1 + index)))
        return parts, results

    recorded, results = run(record=True)
    assert recorded.recorded._update is not None
    assert [bool(step.bad) for step in results] == [index == bad for index in range(len(batches))]
    plain, plain_results = run(record=False)
    assert plain.recorded._update is None
    for actual, expected in zip(results, plain_results, strict=True):
        assert torch.equal(actual.grad_norm, expected.grad_norm)
        assert torch.equal(actual.bad_in_a_row, expected.bad_in_a_row)
        assert torch.equal(actual.flags.read(), expected.flags.read())
    assert torch.equal(recorded.guard.norms.nan_to_num(), plain.guard.norms.nan_to_num())
    for actual, expected in zip(recorded.parameters, plain.parameters, strict=True):
        assert torch.equal(actual, expected)


def on_pretend_gpu(kind, monkeypatch):
    """A method's objective, and what `recorded_steps` would return for it on a GPU."""
    parts = build_parts(replace(CASE, kind=kind), torch.device("cpu"))
    draft = type(parts.objective.draft_model)
    monkeypatch.setattr(draft, "device", torch.device("cuda"))
    monkeypatch.setattr(recorded_module, "_attends_on_gpu", lambda objective: True)
    return parts.objective, lambda: recorded_steps(parts.objective, parts.parameters, tokens=4096)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "dspark"])
def test_objectives_with_even_plans_are_recorded(pretend, kind, monkeypatch):
    objective, recorded = on_pretend_gpu(kind, monkeypatch)
    assert recorded() is not None
    assert objective.quantum == objective.quantum_for(4096, sizes=16) > 0
    with monkeypatch.context() as patch:  # torch's attention cannot be recorded
        patch.setattr(recorded_module, "_attends_on_gpu", lambda objective: False)
        assert recorded() is None
    monkeypatch.setattr(type(objective), "can_be_even", False)
    assert recorded() is None


def test_an_objective_without_even_plans_is_not_recorded(pretend, monkeypatch):
    _, recorded = on_pretend_gpu("eagle1", monkeypatch)
    assert recorded() is None


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_the_target_computes_only_what_the_method_reads(pretend, kind, monkeypatch):
    calls = []
    parts, _ = trained(kind, [], quantum=8)
    for name in ("answer", "features"):
        ask = getattr(parts.target, name)
        monkeypatch.setattr(
            parts.target, name, lambda rows, ask=ask, name=name: calls.append(name) or ask(rows)
        )
    train_step(parts, build_batches(CASE, 1)[0], lr=1e-3)
    assert calls[0] == ("features" if kind == "dflash" else "answer")
