"""MLPs that recompute their activations instead of keeping them."""

import pytest
import torch
from transformers import LlamaConfig

from fledge.methods.shared.layer import gated_mlp, kept_mlps


def kept_and_gradients(recompute):
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape, dtype=torch.float64) for shape in ((7, 5), (9, 5), (9, 5), (5, 9))
    ]
    for tensor in tensors:
        tensor.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        out = gated_mlp(*tensors, recompute=recompute)
    out.square().sum().backward()
    return kept, [out.detach(), *(tensor.grad for tensor in tensors)]


def test_recomputing_gives_the_same_gradients_from_fewer_saved_tensors():
    saved, expected = kept_and_gradients(recompute=False)
    saved_recomputing, actual = kept_and_gradients(recompute=True)
    assert all(torch.equal(got, want) for got, want in zip(actual, expected, strict=True))
    assert [x.shape for x in saved if x.shape == (7, 9)] == [(7, 9)] * 2
    assert not [x.shape for x in saved_recomputing if x.shape == (7, 9)]


@pytest.mark.parametrize(("rows", "kept"), [(2**17, 1), (2**17 + 1, 0)])
def test_activations_are_recomputed_only_beyond_the_limit(rows, kept):
    config = LlamaConfig(intermediate_size=4096)  # two products of 4096 bf16 values: 16 KiB per row
    assert kept_mlps(config, rows, torch.bfloat16, layers=1, kept_gib=2.0) == kept
