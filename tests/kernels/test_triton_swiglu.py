"""The SwiGLU GPU kernels against the torch version; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.methods.shared import mlp as mlp_module
from fledge.methods.shared.mlp import gated_mlp

DEVICE = interpreted_triton.DEVICE


def random(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype).requires_grad_()


def results(function, *leaves):
    out = function(*leaves)
    weight = random(*out.shape, dtype=out.dtype, seed=9).detach()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.fixture
def use(monkeypatch):
    """Run a function with its kernels enabled or disabled, whatever the device."""

    def run(allowed, function, *leaves):
        monkeypatch.setattr(mlp_module, "kernel_runs", lambda x, *, what: allowed)
        return results(function, *leaves)

    return run


def assert_close(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_error_at_most_twice(actual, reference, exact_results):
    for got, rounded, want in zip(actual, reference, exact_results, strict=True):
        assert got.dtype == rounded.dtype
        assert (got - want).norm() <= 2 * (rounded - want).norm()


def mlp_leaves(rows, dtype=torch.float32):
    shapes = [(rows, 6), (11, 6), (11, 6), (6, 11)]
    leaves = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    return [(x.detach() / 3).requires_grad_() for x in leaves]


@pytest.mark.parametrize("rows", [0, 1, 190])
def test_gated_mlp_matches_torch(use, rows):
    """190 x 11 does not fill its last block."""
    leaves = mlp_leaves(rows)
    assert_close(use(True, gated_mlp, *leaves), use(False, gated_mlp, *leaves))


def test_gated_mlp_backward_twice(use):
    """The saved tensors survive a backward pass."""
    leaves = mlp_leaves(5)
    use(True, gated_mlp, *leaves)
    out = gated_mlp(*leaves).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, leaves), strict=True):
        assert torch.equal(a, b)


def single_use_mlp(*leaves):
    return gated_mlp(*leaves, once=True)


def test_overwriting_activations_with_gradients_changes_nothing(use):
    leaves = mlp_leaves(190)
    assert_close(use(True, single_use_mlp, *leaves), use(False, gated_mlp, *leaves))


def test_a_second_backward_over_overwritten_activations_is_rejected(use):
    leaves = mlp_leaves(5)
    use(True, single_use_mlp, *leaves)
    out = single_use_mlp(*leaves).sum()
    torch.autograd.grad(out, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="a second pass"):
        torch.autograd.grad(out, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_that_of_torch(use, dtype):
    leaves = mlp_leaves(60, dtype)
    truth = use(False, gated_mlp, *(x.detach().double().requires_grad_() for x in leaves))
    actual, reference = use(True, gated_mlp, *leaves), use(False, gated_mlp, *leaves)
    assert_error_at_most_twice(actual, reference, truth)
