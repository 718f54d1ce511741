"""Block attention: the fast path against the definition, and the definition against the docs."""

import numpy as np
import pytest
import torch

from fledge.methods.block.attention import (
    Sight,
    block_attention,
    block_visible,
    reference_blocks,
)
from fledge.methods.block.plan import BlockRows
from fledge.rollout import plan

KEYS = 91
SIGHTS = [Sight(), Sight(causal=True), Sight(True, 6), Sight(True, 2), Sight(False, 3)]


def make_rows(size=4, device="cpu"):
    """Three documents at keys 0..8, 9..9, 10..90; blocks close together, far apart, at the ends."""
    slot = np.array([0, 1, 8, 9, 10, 11, 12, 60, 61, 90])
    first = np.array([0, 0, 0, 9, 10, 10, 10, 10, 10, 10])
    return BlockRows.of(slot, first, size, torch.device(device))


def make_inputs(rows, *, keys=KEYS, heads=6, groups=2, channels=16, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    block_shape = (len(rows), rows.size)
    shapes = [
        (*block_shape, heads),
        (keys, groups),
        (keys, groups),
        (*block_shape, groups),
        (*block_shape, groups),
    ]
    device = rows.slot_N.device
    random = [torch.randn(*shape, channels, generator=g) for shape in shapes]
    return [x.to(device, dtype).requires_grad_() for x in random]


def results(function, inputs, rows, sight):
    q, k, v, keys, values = inputs
    out = function(q, (k, v), (keys, values), rows, sight)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    return [out.detach(), *torch.autograd.grad((out * weight.to(out)).sum(), inputs)]


@pytest.mark.parametrize("sight", SIGHTS, ids=str)
@pytest.mark.parametrize("size", [1, 4, 7])
def test_fast_matches_reference(sight, size, monkeypatch):
    rows = make_rows(size)
    inputs = make_inputs(rows)
    expected = results(reference_blocks, inputs, rows, sight)
    for limit in (plan.BLOCK_SCORES, 40):  # in one block of scores, and in many
        monkeypatch.setattr(plan, "BLOCK_SCORES", limit)
        rows = make_rows(size)
        for got, want in zip(results(block_attention, inputs, rows, sight), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_visibility_follows_the_documented_rule():
    """Visibility key by key, as docs/semantics.md defines it."""
    rows = make_rows(4)
    for sight in SIGHTS:
        context, within = block_visible(rows, KEYS, sight)
        for n, (slot, first) in enumerate(zip(*rows.ends_host, strict=True)):
            for j in range(4):
                position = slot + 1 + j
                near = [sight.window is None or position - u < sight.window for u in range(KEYS)]
                expected = [first <= u <= slot and near[u] for u in range(KEYS)]
                assert context[n, j].tolist() == expected
        for j in range(4):
            for i in range(4):
                visible = (not sight.causal or i <= j) and (
                    sight.window is None or j - i < sight.window
                )
                assert bool(within[j, i]) == visible
