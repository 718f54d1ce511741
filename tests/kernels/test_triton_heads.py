"""The GPU kernel that norms and turns heads against its torch lines; interpreted without a GPU."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.draft import heads as heads_module
from fledge.draft.heads import split_heads

DEVICE = interpreted_triton.DEVICE


def random(*shape, seed=0, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(DEVICE, dtype)


def case(rows, heads, groups, channels, dtype=torch.float32):
    """Leaves (projection, both norms), and cos and sin of random angles, other in each half."""
    x = random(rows, (heads + 2 * groups) * channels, dtype=dtype)
    norms = [1 + 0.3 * random(channels, seed=seed, dtype=dtype) for seed in (1, 2)]
    turn = random(rows, channels, seed=3).cos(), random(rows, channels, seed=4).sin()
    return [x, *norms], [angle.to(dtype) for angle in turn]


def results(leaves, turn, groups):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    found = split_heads(*leaves, tuple(turn), eps=1e-5, groups=groups)
    weights = [random(*out.shape, seed=7 + i, dtype=out.dtype) for i, out in enumerate(found)]
    total = sum((out * weight).sum() for out, weight in zip(found, weights, strict=True))
    return [*(out.detach() for out in found), *torch.autograd.grad(total, leaves)]


@pytest.fixture
def use(monkeypatch):
    def run(allowed, *given):
        monkeypatch.setattr(heads_module, "kernel_runs", lambda x, *, what: allowed)
        return results(*given)

    return run


@pytest.mark.parametrize("rows", [0, 1, 33, 130])
@pytest.mark.parametrize(
    ("heads", "groups", "channels"), [(4, 2, 16), (9, 3, 24), (0, 2, 64), (2, 1, 96)]
)
def test_split_heads(use, rows, heads, groups, channels):
    """Queries or none, head counts and dims of any size."""
    leaves, turn = case(rows, heads, groups, channels)
    found, expected = use(True, leaves, turn, groups), use(False, leaves, turn, groups)
    assert [out.shape for out in found[:3]] == [
        (rows, n, channels) for n in (heads, groups, groups)
    ]
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits(use, dtype):
    leaves, turn = case(70, 4, 2, 64, dtype)
    exact = [[x.double() for x in given] for given in (leaves, turn)]
    truth = use(False, *exact, 2)
    found, theirs = use(True, leaves, turn, 2), use(False, leaves, turn, 2)
    for mine, other, true in zip(found, theirs, truth, strict=True):
        assert mine.dtype == other.dtype
        assert (mine - true).norm() <= 2 * (other - true).norm() + 1e-6 * true.norm()


def test_channels_that_are_not_turned_take_the_torch_lines(use):
    (leaves, turn), groups = case(5, 2, 1, 16), 1
    part = [angle[:, :8] for angle in turn]
    for mine, theirs in zip(
        use(True, leaves, part, groups), use(False, leaves, part, groups), strict=True
    ):
        assert torch.equal(mine, theirs)
