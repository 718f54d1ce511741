"""Two implementations on the same random inputs: outputs and gradients."""

import torch

import interpreted_triton  # before the kernels

DEVICE = interpreted_triton.DEVICE
HALF_DTYPES = [torch.bfloat16, torch.float16]


def random(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype).requires_grad_()


def results(function, leaves):
    """The outputs of a function (one or several), and the gradients of its inputs."""
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [random(*x.shape, dtype=x.dtype, seed=9 + i) for i, x in enumerate(outputs)]
    total = sum((x * w.detach()).sum() for x, w in zip(outputs, weights, strict=True))
    return [*(x.detach() for x in outputs), *torch.autograd.grad(total, leaves)]


def exact(leaves):
    return [x.detach().double().requires_grad_() for x in leaves]


def assert_close(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=2 * tolerance)


def assert_equal(actual, expected):
    assert all(map(torch.equal, actual, expected))
    assert len(actual) == len(expected)


def assert_error_at_most_twice(actual, reference, truth):
    """A kernel in 16 bits may be off by twice what rounding in torch costs."""
    for got, rounded, want in zip(actual, reference, truth, strict=True):
        assert got.dtype == rounded.dtype
        assert (got - want).norm() <= 2 * (rounded - want).norm() + 1e-6 * want.norm()
