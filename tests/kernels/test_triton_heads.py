"""The kernel that normalizes and rotates heads against torch; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.methods.shared import rotary as heads_module
from fledge.methods.shared.rotary import split_heads

DEVICE = interpreted_triton.DEVICE


def random(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype)


def make_case(rows, heads, groups, channels, dtype=torch.float32):
    """Leaves (projection, both norms), and random cos and sin that differ between the halves."""
    x = random(rows, (heads + 2 * groups) * channels, dtype=dtype)
    norms = [1 + 0.3 * random(channels, seed=seed, dtype=dtype) for seed in (1, 2)]
    turn = random(rows, channels, seed=3).cos(), random(rows, channels, seed=4).sin()
    return [x, *norms], [angle.to(dtype) for angle in turn]


def results(leaves, turn, groups):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = split_heads(*leaves, tuple(turn), eps=1e-5, groups=groups)
    weights = [random(*out.shape, seed=7 + i, dtype=out.dtype) for i, out in enumerate(outputs)]
    total = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    return [*(out.detach() for out in outputs), *torch.autograd.grad(total, leaves)]


@pytest.fixture
def use(monkeypatch):
    def run(allowed, *arguments):
        monkeypatch.setattr(heads_module, "kernel_runs", lambda x, *, what: allowed)
        return results(*arguments)

    return run


@pytest.mark.parametrize("rows", [0, 1, 33, 130])
@pytest.mark.parametrize(
    ("heads", "groups", "channels"), [(4, 2, 16), (9, 3, 24), (0, 2, 64), (2, 1, 96)]
)
def test_split_heads_matches_torch(use, rows, heads, groups, channels):
    """With and without queries, for various head counts and dims."""
    leaves, turn = make_case(rows, heads, groups, channels)
    actual, expected = use(True, leaves, turn, groups), use(False, leaves, turn, groups)
    assert [out.shape for out in actual[:3]] == [
        (rows, n, channels) for n in (heads, groups, groups)
    ]
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_that_of_torch(use, dtype):
    leaves, turn = make_case(70, 4, 2, 64, dtype)
    exact = [[x.double() for x in tensors] for tensors in (leaves, turn)]
    truth = use(False, *exact, 2)
    fused, reference = use(True, leaves, turn, 2), use(False, leaves, turn, 2)
    for got, rounded, want in zip(fused, reference, truth, strict=True):
        assert got.dtype == rounded.dtype
        assert (got - want).norm() <= 2 * (rounded - want).norm() + 1e-6 * want.norm()


def test_partial_rotary_falls_back_to_torch(use):
    (leaves, turn), groups = make_case(5, 2, 1, 16), 1
    part = [angle[:, :8] for angle in turn]
    for got, want in zip(
        use(True, leaves, part, groups), use(False, leaves, part, groups), strict=True
    ):
        assert torch.equal(got, want)
