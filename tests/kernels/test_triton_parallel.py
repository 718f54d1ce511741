"""P-EAGLE's kernels on hand-made rows; `test_peagle_triton.py` runs them on real plans.

Every rollout begins at its own slot of one document.
"""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.methods.peagle.draft import reference_parallel
from fledge.rollout.attention_triton import fused_parallel
from fledge.rollout.plan import QueryRows

DEVICE = interpreted_triton.DEVICE
SLOTS = 50


def make_rows(counts):
    """All slots are queries at depth 0; rollout i begins at slot 3 * i."""
    chain = [3 * torch.arange(count) for count in counts]
    slot_X = torch.cat([torch.arange(SLOTS), *chain])
    return QueryRows(*(x.to(DEVICE) for x in (slot_X, slot_X * 0, torch.argsort(slot_X))))


def make_inputs(counts, *, heads=6, groups=2, channels=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    rows = [(SLOTS + sum(counts), heads), *[(SLOTS, groups)] * 2, *[(sum(counts), groups)] * 2]
    random = [torch.randn(*shape, channels, generator=g) for shape in rows]
    return [x.to(DEVICE, dtype).requires_grad_() for x in random]


def results(function, inputs, counts):
    q, k, v, keys, values = inputs
    out = function(q, (k, v), (keys, values), make_rows(counts), counts)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    return [out.detach(), *torch.autograd.grad((out * weight.to(out)).sum(), inputs)]


@pytest.mark.parametrize("counts", [(), (0, 0), (1,), (16, 9, 9, 2, 0), (16,) * 10])
def test_fused_matches_reference(counts):
    inputs = make_inputs(counts)
    expected = results(reference_parallel, inputs, counts)
    for got, want in zip(results(fused_parallel, inputs, counts), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_that_of_the_reference(dtype):
    counts = (16, 9, 4)
    inputs = make_inputs(counts, channels=64, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = results(reference_parallel, exact, counts)
    reference = results(reference_parallel, inputs, counts)
    fused = results(fused_parallel, inputs, counts)
    for got, rounded, want in zip(fused, reference, truth, strict=True):
        assert got.dtype == dtype
        assert (got - want).norm() <= 2 * (rounded - want).norm()


def test_scores_far_below_zero():
    """A missing key contributes nothing, not exp(0 - a very negative log-sum-exp)."""
    counts = (16, 4)
    q, k, v, keys, values = (x.detach().abs() for x in make_inputs(counts))
    inputs = [x.requires_grad_() for x in (q * -100, k, v, keys, values)]
    result = results(fused_parallel, inputs, counts)
    assert all(x.isfinite().all() for x in result)
    for got, want in zip(result, results(reference_parallel, inputs, counts), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
