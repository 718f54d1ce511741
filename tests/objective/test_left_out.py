"""The rollouts that EAGLE-3 leaves out at random (`depth_keep`)."""

import numpy as np
import pytest
import torch

from fledge.rollout import plan as plans
from fledge.rollout.slots import Documents, surviving_depths
from objective.cases import assert_same, eagle3, run
from objective.naive_eagle3 import make_documents, make_draft, packed_batch, padded_batch

STEPS, KEEP = 4, 0.6
LENGTHS = [9, 1, 6, 13, 2]


def packed(documents):
    return packed_batch([documents[:2], documents[2:4], documents[4:]], 20)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 2}], ids=["one layer", "two layers"])
@pytest.mark.parametrize("pack", [padded_batch, packed])
def test_the_expected_gradient_is_that_of_the_full_unroll(monkeypatch, changes, pack):
    """Gradients add up over rollouts, so their expectation depends only on each rollout's survival
    probabilities: here all rollouts survive equally long, and the expectation has STEPS terms."""
    draft, batch = make_draft(**changes), pack(make_documents(LENGTHS))
    full, want = run(eagle3(draft), batch)
    thinned = eagle3(draft, depth_keep=KEEP)
    loss, got = 0.0, {name: torch.zeros_like(grad) for name, grad in want.items()}
    for deepest in range(STEPS):
        probability = KEEP**deepest - (KEEP ** (deepest + 1) if deepest < STEPS - 1 else 0)
        monkeypatch.setattr(
            plans, "surviving_depths", lambda slots, d=deepest, **_: np.full(len(slots.place), d)
        )
        out, grads = run(thinned, batch)
        assert out.charged.tolist()[: deepest + 1] == full.charged.tolist()[: deepest + 1]
        assert out.charged[deepest + 1 :].sum() == 0
        loss += probability * out.loss
        for name in got:
            got[name] += probability * grads[name]
    torch.testing.assert_close(loss, full.loss, rtol=1e-11, atol=1e-11)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-12)


def test_a_seed_fixes_the_sample_and_packing_does_not_change_it():
    documents, module = make_documents(LENGTHS), eagle3(depth_keep=KEEP)
    padded = padded_batch(documents)
    first, again = (run(module, padded, seed=3) for _ in range(2))
    assert_same(first, again, tolerance=0)
    assert_same(first, run(module, packed(documents), seed=3))
    other_losses = {run(module, padded, seed=s)[0].loss.item() for s in range(4, 9)}
    assert len(other_losses) == 5


def test_depths_survive_with_the_stated_probability():
    place = np.arange(200_000)
    slots = Documents(np.ones(len(place), dtype=bool), np.zeros_like(place), place)
    deepest = surviving_depths(slots, num_depths=7, keep=0.7, seed=1)
    for depth in range(7):
        probability = 0.7**depth
        deviation = (probability * (1 - probability) / len(place)) ** 0.5
        assert abs((deepest >= depth).mean() - probability) <= 4 * deviation
