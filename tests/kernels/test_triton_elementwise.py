"""Rotary, SwiGLU and the split into heads: GPU kernels against torch, interpreted without a GPU."""

from functools import partial

import pytest
import torch

import interpreted_triton  # noqa: F401  (before the kernels)
from fledge.kernels.elementwise import fused_rotate
from fledge.methods.shared import layer, rotary
from fledge.methods.shared.layer import gated_mlp
from fledge.methods.shared.rotary import rotate, split_heads
from kernels.compare import (
    HALF_DTYPES,
    assert_close,
    assert_equal,
    assert_error_at_most_twice,
    exact,
    random,
    results,
)


@pytest.fixture
def use(monkeypatch):
    """Run a function with its kernels enabled or disabled, whatever the device."""

    def run(allowed, function, leaves):
        for module in (layer, rotary):
            monkeypatch.setattr(module, "kernel_runs", lambda x, *, what: allowed)
        return results(function, leaves)

    return run


def angles(rows, channels, dtype=torch.float32):
    """cos and sin that differ between the halves."""
    cos, sin = (random(rows, channels, seed=seed).detach() for seed in (3, 4))
    return cos.cos().to(dtype), sin.sin().to(dtype)


def rotation(rows, heads, channels, rotated, dtype=torch.float32):
    """A function and its leaves."""
    turn = angles(rows, rotated, dtype)
    return lambda x: rotate(x, *(t.to(x.dtype) for t in turn)), [
        random(rows, heads, channels, dtype=dtype)
    ]


def heads(rows, heads, groups, channels, dtype=torch.float32, rotated=None):
    x = random(rows, (heads + 2 * groups) * channels, dtype=dtype)
    norms = [1 + 0.3 * random(channels, seed=seed, dtype=dtype).detach() for seed in (1, 2)]
    turn = angles(rows, rotated or channels, dtype)

    def split(x, *norms):
        return split_heads(x, *norms, tuple(t.to(x.dtype) for t in turn), eps=1e-5, groups=groups)

    return split, [x, *(norm.requires_grad_() for norm in norms)]


def swiglu(rows, dtype=torch.float32, **options):
    shapes = [(rows, 6), (11, 6), (11, 6), (6, 11)]
    leaves = [random(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]
    leaves = [(x.detach() / 3).requires_grad_() for x in leaves]
    return partial(gated_mlp, **options), leaves


CASES = {
    # all channels rotated, or only some
    **{f"rotary, {rows} rows, {sizes}": rotation(rows, *sizes)
       for rows in (0, 1, 130) for sizes in ((3, 16, 16), (9, 24, 24), (2, 20, 6))},
    # with and without queries
    **{f"heads, {rows} rows, {sizes}": heads(rows, *sizes)
       for rows in (0, 1, 33, 130) for sizes in ((4, 2, 16), (9, 3, 24), (0, 2, 64), (2, 1, 96))},
    # 190 x 11 does not fill its last block
    **{f"swiglu, {rows} rows": swiglu(rows) for rows in (0, 1, 190)},
    "swiglu, activations overwritten": swiglu(190, once=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_torch(use, name):
    function, leaves = CASES[name]
    assert_close(use(True, function, leaves), use(False, function, leaves))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    "case",
    [partial(rotation, 40, 4, 64, 64), partial(heads, 70, 4, 2, 64), partial(swiglu, 60)],
    ids=["rotary", "heads", "swiglu"],
)
def test_16_bit_error_is_at_most_twice_that_of_torch(use, case, dtype):
    function, leaves = case(dtype=dtype)
    truth = use(False, function, exact(leaves))
    actual, reference = use(True, function, leaves), use(False, function, leaves)
    assert_error_at_most_twice(actual, reference, truth)


def test_rotate_a_strided_view():
    wide, turn = random(7, 5, 16), angles(7, 16)
    expected = results(lambda x: fused_rotate(x[:, 1:4].contiguous(), *turn), [wide])
    assert_equal(results(lambda x: fused_rotate(x[:, 1:4], *turn), [wide]), expected)


def test_a_second_backward_pass(use):
    """It works unless the first may overwrite the activations."""
    function, leaves = swiglu(5)
    use(True, function, leaves)
    out = function(*leaves).sum()
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    assert_equal(first, torch.autograd.grad(out, leaves))
    out = function(*leaves, once=True).sum()
    torch.autograd.grad(out, leaves, retain_graph=True)
    with pytest.raises(RuntimeError, match="a second pass"):
        torch.autograd.grad(out, leaves)
