"""Products through oneDNN are torch's, up to rounding, whatever the layout of their factors."""

import pytest
import torch
from torch.nn import functional as F

from fledge.core import products

N, K, M = 130, 96, 520


def layouts(rows, columns):
    whole = torch.randn(rows, columns)
    wider = torch.randn(rows, 2 * columns)
    return whole, torch.randn(columns, rows).t(), wider[:, columns:], wider.t()[:columns].t()


@pytest.fixture(autouse=True)
def used(monkeypatch):
    """All products are large; yields how many oneDNN computed."""
    calls, through = [], products._linear_pointwise
    monkeypatch.setattr(products, "_FEWEST", 1)
    monkeypatch.setattr(products, "_ROWS", 50)  # several parts
    monkeypatch.setattr(
        products, "_linear_pointwise", lambda *args: (calls.append(1), through(*args))[1]
    )
    return calls


def test_products_of_any_layout(used):
    for a_NK in layouts(N, K):
        for b_KM in layouts(K, M):
            expected = (a_NK.double() @ b_KM.double()).float()
            torch.testing.assert_close(products.matmul(a_NK, b_KM), expected, rtol=1e-5, atol=1e-4)
            into = torch.randn(N, M)
            summed = products.add_product(into.clone(), a_NK, b_KM)
            torch.testing.assert_close(summed, into + expected, rtol=1e-5, atol=1e-4)
    assert used


def test_linear_and_its_gradients(used):
    for bias in (None, torch.randn(M)):
        inputs = [torch.randn(N, K), *layouts(M, K)[2:3], torch.randn(N, M)]
        results = []
        for of in (F.linear, products.linear):
            x_NK, weight_MK, base_NM = leaves = [x.clone().requires_grad_() for x in inputs]
            onto = products.linear_onto(base_NM, x_NK, weight_MK)
            if of is F.linear:
                onto = base_NM + F.linear(x_NK, weight_MK)
            out = of(x_NK, weight_MK, bias) * onto
            results.append((out, *torch.autograd.grad(out.sum(), leaves)))
        for actual, expected in zip(*reversed(results), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-2)
    assert used


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_left_to_torch(used, dtype):
    a_NK, b_KM = torch.randn(N, K).to(dtype), torch.randn(K, M).to(dtype)
    assert torch.equal(products.matmul(a_NK, b_KM), a_NK @ b_KM)
    assert not used
