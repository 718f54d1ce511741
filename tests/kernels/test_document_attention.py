"""Attention within packed documents: the kernel of compiled targets against the definition."""

import pytest
import torch

import interpreted_triton
from fledge.rollout.attention import attend_documents, reference_attention
from fledge.rollout.plan import QueryRows

DEVICE = interpreted_triton.DEVICE


def first_of(lengths, window=None):
    first = torch.cat([torch.full((n,), sum(lengths[:i])) for i, n in enumerate(lengths)])
    if window is not None:
        first = torch.maximum(first, torch.arange(len(first)) - (window - 1))
    return first.to(DEVICE)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 1, 24), (2, 2, 40)])
@pytest.mark.parametrize("lengths", [[1], [37], [9, 1, 1, 70, 3], [1] * 11, [64, 65]])
def test_kernel_matches_the_definition(lengths, heads, window):
    torch.manual_seed(0)
    queries, groups, channels = heads
    first_N = first_of(lengths, window)
    q, k, v = (
        torch.randn(len(first_N), n, channels, device=DEVICE) for n in (queries, groups, groups)
    )
    slot_N = torch.arange(len(first_N), device=DEVICE)
    got = attend_documents(q, k, v, first_N, slot_N)
    want = reference_attention(q, k, v, QueryRows(slot_N, first_N, slot_N), ())
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
