"""Recorded steps on a GPU: the same bits as steps that are not, in the memory of one."""

import pytest
import torch

from fledge.bench.train_step import Case, build_batches, build_parts
from fledge.train.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASE = Case(shape="135m", seq=2048, documents=150, batch=1)


def trained(batches, *, record):
    torch.manual_seed(0)
    parts = build_parts(CASE, torch.device("cuda"))
    parts.objective.quantum = 64  # many sizes
    if not record:
        parts.recorded._sizes.comes_back = lambda size: False
    norms = [train_step(parts, batch, lr=1e-3).grad_norm for batch in batches]
    return parts, torch.stack(norms)


def test_recorded_steps_have_the_same_bits():
    batches = build_batches(CASE, 12)[:10]
    batches = [*batches, *batches]  # every size comes back
    ours, norms = trained(batches, record=True)
    assert len(ours.recorded._sizes.sizes) > 1
    theirs, wanted = trained(batches, record=False)
    assert torch.equal(norms, wanted)
    for mine, other in zip(ours.parameters, theirs.parameters, strict=True):
        assert torch.equal(mine, other)


def test_recorded_sizes_share_their_memory():
    batches = build_batches(CASE, 12)[:10]
    parts, _ = trained(batches, record=True)
    torch.cuda.synchronize()
    held, sizes = [], []
    for batch in batches:
        train_step(parts, batch, lr=1e-3)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
        sizes.append(len(parts.recorded._sizes.sizes))
    assert sizes[0] == 1
    assert sizes[-1] > 2
    activations = held[0] - torch.cuda.memory_allocated()
    assert held[-1] - held[0] < max(0.5 * activations, 256 * 2**20)
