"""The GPU kernels on all depths at once, against the dense definition.

This covers what EAGLE-3 never exercises: several rows per anchor, and keys that end with a segment.
"""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.methods.peagle import draft as parallel
from fledge.methods.peagle.draft import parallel_attention
from fledge.methods.peagle.plan import plan_parallel
from fledge.rollout.slots import RowMasks

pytestmark = pytest.mark.slow

DEVICE = interpreted_triton.DEVICE


@pytest.mark.parametrize(("partitions", "quantum"), [(1, 0), (3, 0), (1, 32)])
@pytest.mark.parametrize("lengths", [[70], [5, 1, 40, 3]])
def test_kernels_match_the_definition_on_all_depths_at_once(
    monkeypatch, lengths, partitions, quantum
):
    ones = torch.ones(1, sum(lengths))
    masks = RowMasks(
        ones,
        ones,
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        seq_lens=torch.tensor([lengths]),
        doc_remaining=torch.cat([torch.arange(n - 1, -1, -1) for n in lengths])[None],
    )
    plan = plan_parallel(
        masks,
        num_depths=4,
        ratio=0.7,
        ratio_min=0.2,
        seed=1,
        partitions=partitions,
        quantum=quantum,
        device=torch.device(DEVICE),
    )
    monkeypatch.setattr(parallel, "kernel_runs", lambda *tensors: True)
    assert len(plan.segments) == partitions
    real_slots = sum(lengths) - len(lengths)  # the last slot of a document has no target
    for segment in plan.segments:
        for rows in (segment.every, segment.asking):
            inputs = make_inputs(segment, rows)
            fast, expected = (
                results(inputs, segment, rows, kind, real_slots) for kind in ("fast", "reference")
            )
            for got, want in zip(fast, expected, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def make_inputs(segment, rows, heads=4, groups=2, channels=16):
    g = torch.Generator().manual_seed(2)
    chain = sum(segment.counts)
    shapes = [(len(rows), heads), *[(segment.end, groups)] * 2, *[(chain, groups)] * 2]
    return [
        torch.randn(*shape, channels, generator=g).to(DEVICE).requires_grad_() for shape in shapes
    ]


def results(inputs, segment, rows, kind, real_slots):
    q, k, v, chain_k, chain_v = inputs
    out = parallel_attention(
        q, (k, v), (chain_k, chain_v), rows, segment.counts, starts_K=segment.starts_K, kind=kind
    )
    if kind == "fast":
        assert out.grad_fn.name() == "_FusedParallelBackward"
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    # padding rows, all on one slot, attend to each other in the definition only
    out = out * (rows.slot_N < real_slots)[:, None, None]
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)]
