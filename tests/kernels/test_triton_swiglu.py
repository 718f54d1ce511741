"""The GPU kernels of SwiGLU against its torch lines; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.draft import mlp as mlp_module
from fledge.draft.mlp import gated_mlp

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
    """Run a function with its kernels allowed or not, whatever the device."""

    def run(allowed, function, *leaves):
        monkeypatch.setattr(mlp_module, "kernel_runs", lambda x, *, what: allowed)
        return results(function, *leaves)

    return run


def assert_close(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def assert_error_within_twice(found, theirs, truth):
    for mine, other, exact in zip(found, theirs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - exact).norm() <= 2 * (other - exact).norm()


def mlp_leaves(rows, dtype=torch.float32):
    shapes = [(rows, 6), (11, 6), (11, 6), (6, 11)]
    leaves = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    return [(x.detach() / 3).requires_grad_() for x in leaves]


@pytest.mark.parametrize("rows", [0, 1, 190])
def test_gated_mlp(use, rows):
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


def once(*leaves):
    return gated_mlp(*leaves, once=True)


def test_activations_that_become_gradients(use):
    leaves = mlp_leaves(190)
    assert_close(use(True, once, *leaves), use(False, gated_mlp, *leaves))


def test_activations_that_became_gradients_are_not_read_again(use):
    leaves = mlp_leaves(5)
    use(True, once, *leaves)
    out = once(*leaves).sum()
    torch.autograd.grad(out, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="a second pass"):
        torch.autograd.grad(out, leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_mlp_in_16_bits(use, dtype):
    leaves = mlp_leaves(60, dtype)
    truth = use(False, gated_mlp, *(x.detach().double().requires_grad_() for x in leaves))
    found, theirs = use(True, gated_mlp, *leaves), use(False, gated_mlp, *leaves)
    assert_error_within_twice(found, theirs, truth)
