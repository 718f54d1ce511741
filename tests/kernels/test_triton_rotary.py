"""The rotary GPU kernel against the torch version; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.kernels.elementwise import fused_rotate
from fledge.methods.shared import rotary as rotary_module
from fledge.methods.shared.rotary import rotate

DEVICE = interpreted_triton.DEVICE


def random(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype).requires_grad_()


def angles(rows, channels, dtype=torch.float32):
    angle = random(rows, channels, seed=5).detach()
    return angle.cos().to(dtype), angle.sin().to(dtype)


def results(function, *leaves):
    out = function(*leaves)
    weight = random(*out.shape, dtype=out.dtype, seed=9).detach()
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.fixture
def use(monkeypatch):
    """Run a function with its kernels enabled or disabled, whatever the device."""

    def run(allowed, function, *leaves):
        monkeypatch.setattr(rotary_module, "kernel_runs", lambda x, *, what: allowed)
        return results(function, *leaves)

    return run


def assert_close(actual, expected, tolerance=1e-5):
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_error_at_most_twice(actual, reference, exact_results):
    for got, rounded, want in zip(actual, reference, exact_results, strict=True):
        assert got.dtype == rounded.dtype
        assert (got - want).norm() <= 2 * (rounded - want).norm()


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize(("heads", "channels", "rotated"), [(3, 16, 16), (9, 24, 24), (2, 20, 6)])
def test_rotate_matches_torch(use, rows, heads, channels, rotated):
    """All channels rotated, or only some; various head counts and dims."""
    x, (cos, sin) = random(rows, heads, channels), angles(rows, rotated)
    actual = use(True, lambda x: rotate(x, cos, sin), x)
    assert_close(actual, use(False, lambda x: rotate(x, cos, sin), x))


def test_rotate_a_strided_view(use):
    wide, (cos, sin) = random(7, 5, 16), angles(7, 16)
    expected = results(lambda x: fused_rotate(x[:, 1:4].contiguous(), cos, sin), wide)
    actual = results(lambda x: fused_rotate(x[:, 1:4], cos, sin), wide)
    for got, want in zip(actual, expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_that_of_torch(use, dtype):
    x, (cos, sin) = random(40, 4, 64, dtype=dtype), angles(40, 64, dtype)
    exact = x.detach().double().requires_grad_()
    truth = use(False, lambda x: rotate(x, cos.double(), sin.double()), exact)
    actual = use(True, lambda x: rotate(x, cos, sin), x)
    assert_error_at_most_twice(actual, use(False, lambda x: rotate(x, cos, sin), x), truth)
