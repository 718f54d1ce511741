"""Recorded steps on a GPU: the same bits as unrecorded ones, in the memory of one recording."""

from dataclasses import replace

import pytest
import torch
from test_recorded_steps import KINDS, with_muon

from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.training.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASE = Case(shape="135m", seq=2048, documents=150, batch=1)


def make_parts(kind, *, quantum):
    torch.manual_seed(0)
    method, changes = KINDS[kind]
    case = replace(CASE, kind=method, record=quantum > 0)
    parts = build_parts(case, torch.device("cuda"))
    for name, value in changes.items():
        setattr(parts.objective, name, value)
    parts.objective.quantum = quantum
    return parts


def trained(batches, *, record, kind="eagle3", lr=1e-3, muon=False):
    parts = make_parts(kind, quantum=64 if kind == "eagle3" else 8)  # so that many sizes occur
    if muon:
        with_muon(parts)
    if not record:
        parts.recorded._sizes.worth_it = lambda size: False
        parts.recorded._updates = -len(batches)
    norms = [train_step(parts, batch, lr=lr).grad_norm for batch in batches]
    return parts, torch.stack(norms)


@pytest.mark.parametrize(
    ("kind", "muon"), [*((kind, False) for kind in KINDS), ("eagle3", True), ("dspark", True)]
)
def test_recorded_steps_have_the_same_bits(kind, muon):
    batches = build_batches(CASE, 12)[:10]
    batches = [*batches, *batches]  # every size comes back
    recorded, norms = trained(batches, record=True, kind=kind, muon=muon)
    assert len(recorded.recorded._sizes.sizes) > 1
    plain, wanted = trained(batches, record=False, kind=kind, muon=muon)
    assert torch.equal(norms, wanted)
    for actual, expected in zip(recorded.parameters, plain.parameters, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_match_those_of_exact_sizes(kind):
    """Up to rounding, which differs between matrix products of different shapes."""
    batches = build_batches(CASE, 12)[:4]
    batches = [*batches, *batches]
    recorded, norms = trained(batches, record=True, kind=kind, lr=1e-5)
    assert recorded.recorded._sizes.sizes
    exact = make_parts(kind, quantum=0)
    assert exact.recorded is None
    wanted = torch.stack([train_step(exact, batch, lr=1e-5).grad_norm for batch in batches])
    torch.testing.assert_close(norms, wanted, rtol=0.01, atol=0)


def test_recorded_sizes_share_their_memory():
    batches = build_batches(CASE, 12)[:10]
    parts = make_parts("eagle3", quantum=64)
    reserved = {}  # bytes by number of recorded sizes
    for batch in [*batches, *batches]:
        train_step(parts, batch, lr=1e-3)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        reserved.setdefault(len(parts.recorded._sizes.sizes), torch.cuda.memory_reserved())
    assert max(reserved) > 2
    activations = reserved[1] - torch.cuda.memory_allocated()
    # without sharing, every size would add as much again; later ones are larger and leave gaps
    assert reserved[max(reserved)] - reserved[1] < max(activations, 256 * 2**20)
