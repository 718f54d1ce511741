"""The GPU kernel of rotary positions against its torch lines; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.draft import rotary as rotary_module
from fledge.draft.rotary import rotate
from fledge.kernels.rotary import fused_rotate

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
    """Run a function with its kernels allowed or not, whatever the device."""

    def run(allowed, function, *leaves):
        monkeypatch.setattr(rotary_module, "kernel_runs", lambda x, *, what: allowed)
        return results(function, *leaves)

    return run


def assert_close(found, expected, tolerance=1e-5):
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def assert_error_within_twice(found, theirs, truth):
    for mine, other, exact in zip(found, theirs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - exact).norm() <= 2 * (other - exact).norm()


@pytest.mark.parametrize("rows", [0, 1, 130])
@pytest.mark.parametrize(("heads", "channels", "rotated"), [(3, 16, 16), (9, 24, 24), (2, 20, 6)])
def test_rotate(use, rows, heads, channels, rotated):
    """All channels turned, or only some; head counts and dims of any size."""
    x, (cos, sin) = random(rows, heads, channels), angles(rows, rotated)
    found = use(True, lambda x: rotate(x, cos, sin), x)
    assert_close(found, use(False, lambda x: rotate(x, cos, sin), x))


def test_rotate_a_strided_view(use):
    wide, (cos, sin) = random(7, 5, 16), angles(7, 16)
    expected = results(lambda x: fused_rotate(x[:, 1:4].contiguous(), cos, sin), wide)
    found = results(lambda x: fused_rotate(x[:, 1:4], cos, sin), wide)
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotate_in_16_bits(use, dtype):
    x, (cos, sin) = random(40, 4, 64, dtype=dtype), angles(40, 64, dtype)
    exact = x.detach().double().requires_grad_()
    truth = use(False, lambda x: rotate(x, cos.double(), sin.double()), exact)
    found = use(True, lambda x: rotate(x, cos, sin), x)
    assert_error_within_twice(found, use(False, lambda x: rotate(x, cos, sin), x), truth)
