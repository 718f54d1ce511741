"""Gradients are clipped by norm: within the optimizer update on a GPU, as torch does elsewhere."""

import pytest
import torch
from torch import nn

from fledge.training.optimizer import clip_gradients, make_optimizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def updated(device, limit, *, by_torch):
    """The gradient norm, and the weights after one step."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (3,), (4, 9))]
    parameters = [nn.Parameter(p.detach().to(device)) for p in parameters]
    optimizer = make_optimizer(parameters, lr=0.1, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1)
    for p in parameters[:2]:  # the last one has no gradient
        p.grad = 3 * torch.randn(p.shape).to(device)
    if by_torch:
        norm = nn.utils.clip_grad_norm_(parameters, float("inf") if limit is None else limit)
    else:
        norm = clip_gradients([optimizer], parameters, limit)
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    return [norm, *(p.detach() for p in parameters)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 0.5, 1e6])
def test_the_update_matches_that_of_gradients_clipped_by_torch(device, limit):
    pairs = zip(
        updated(device, limit, by_torch=False), updated(device, limit, by_torch=True), strict=True
    )
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=0 if device == "cpu" else 1e-6, atol=0)
