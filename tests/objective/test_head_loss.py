"""The chunked head and loss against the definitions: values and gradients."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fledge.core.head import TargetHead, target_distribution_from_hidden
from fledge.methods.losses.base import Loss, acceptance
from fledge.methods.losses.cross_entropy import CrossEntropy
from fledge.methods.losses.kl import KLDivergence
from fledge.methods.losses.lk_alpha import LkAlpha
from fledge.methods.losses.lk_lambda import LkLambda
from fledge.methods.losses.registry import LOSSES
from fledge.methods.shared.head_loss import HeadTask, head_loss
from fledge.methods.shared.supervision import (
    HiddenSupervision,
    ProbsSupervision,
    VocabularyTensors,
    head_rows,
)
from fledge.rollout.plan import HeadElements
from objective.naive_eagle3 import reference_loss

E, W, DEPTHS = 5, 11, 3
KINDS = list(LOSSES)


def make_loss(kind):
    """The loss, with non-default parameters if it has any."""
    parameters = {"lk_lambda": {"scale": 0.8, "decay": 1.5}}
    return LOSSES[kind](**parameters.get(kind, {}))


def make_case(count, *, slots=6, seed=0, dtype=torch.float64):
    """Elements with random states, depths and target slots, sorted by target."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count + 2, E, generator=g, dtype=dtype).requires_grad_()
    head = torch.randn(W, E, generator=g, dtype=dtype).requires_grad_()
    target = torch.randint(0, slots, (count,), generator=g).sort().values
    elements = HeadElements(
        torch.randperm(count + 2, generator=g)[:count],  # two states belong to no element
        torch.randint(0, DEPTHS, (count,), generator=g),
        target,
        target.numpy().astype(np.int64),
    )
    probs = torch.softmax(2 * torch.randn(slots, W, generator=g, dtype=dtype), -1)
    charged = torch.rand(count, generator=g) < 0.7
    supervision = ProbsSupervision(probs, torch.ones(slots), torch.arange(slots))
    return hidden, head, elements, supervision, charged


def definition_loss(hidden, head, elements, supervision, charged, loss):
    logits = hidden[elements.element_N] @ head.T
    probs = supervision.probs_SW[elements.target_N]
    return sum(
        (k + 1) * reference_loss(logits, probs, charged & (elements.depth_N == k), loss)
        for k in range(DEPTHS)
    )


def chunked(hidden, head, elements, supervision, charged, loss, chunk_rows):
    counts = torch.bincount(elements.depth_N[charged], minlength=DEPTHS).clamp_min(1)
    coefficient = torch.arange(1, DEPTHS + 1, dtype=hidden.dtype) / counts
    task = HeadTask(elements, supervision, charged, loss, DEPTHS, chunk_rows)
    return head_loss(hidden, head, task, coefficient_N=coefficient[elements.depth_N])


def assert_matches_definition(case, loss, chunk_rows):
    expected, result = definition_loss(*case, loss), chunked(*case, loss, chunk_rows)
    torch.testing.assert_close(result.loss, torch.as_tensor(expected), rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(2.5 * result.loss, case[:2])
    expected_grads = torch.autograd.grad(2.5 * expected, case[:2])
    for got, want in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    return result


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 20), chunk_rows=st.integers(1, 25), seed=st.integers(0, 999))
@example(count=17, chunk_rows=8, seed=0)
@example(count=17, chunk_rows=100, seed=0)
def test_chunked_matches_the_definition(kind, count, chunk_rows, seed):
    assert_matches_definition(make_case(count, seed=seed), make_loss(kind), chunk_rows)


class Squares(Loss):
    """A loss that has nothing but its definition."""

    kind: str = "squares"

    def definition(self, logits_NW, probs_NW):
        return (logits_NW.softmax(-1) - probs_NW).square().sum(-1)


@pytest.mark.parametrize("chunk_rows", [3, 100])
def test_a_loss_may_have_nothing_but_a_definition(chunk_rows):
    case = make_case(17)
    result = assert_matches_definition(case, Squares(), chunk_rows)
    with torch.no_grad():
        assert chunked(*case, Squares(), chunk_rows).loss == result.loss


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not LOSSES[kind].needs_acceptance])
def test_handwritten_rows_match_the_definition(kind):
    """Covers every loss whose `rows` could be derived from its definition."""
    torch.manual_seed(0)
    logits, probs = torch.randn(7, W).double(), torch.softmax(2 * torch.randn(7, W).double(), -1)
    derived = Loss.rows(LOSSES[kind](), logits.clone(), probs)
    handwritten = LOSSES[kind]().rows(logits.clone(), probs)
    torch.testing.assert_close(handwritten, derived, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not LOSSES[kind].needs_acceptance])
def test_probabilities_that_round_to_zero_give_finite_rows(kind):
    """Also where subnormal numbers are flushed to 0, as on some devices."""
    logits, probs = torch.full((1, 64), -200.0), torch.zeros(1, 64)
    logits[0, 0], probs[0, 0] = 0.0, 1.0
    torch.set_flush_denormal(True)
    try:
        loss, gradient = LOSSES[kind]().rows(logits, probs)
    finally:
        torch.set_flush_denormal(False)
    assert loss.tolist() == [0.0]
    assert not gradient.any()


def test_zero_acceptance_gives_finite_gradients():
    """Where alpha == 0, all gradients are finite and the LK-alpha loss is 0."""
    hidden, head, elements, supervision, charged = make_case(4, slots=1)
    one_hot = torch.zeros(1, W, dtype=torch.float64)
    one_hot[0, 3] = 1.0
    head.data.zero_()
    head.data[0] = 1.0
    hidden.data.fill_(1e4)  # q is 1 on token 0 and underflows to 0 on token 3
    supervision = ProbsSupervision(one_hot, torch.ones(1), torch.zeros(1, dtype=torch.long))
    charged = torch.ones_like(charged)
    assert acceptance(hidden @ head.T, one_hot).max() == 0
    for loss in (LkAlpha(), LkLambda()):
        case = (hidden, head, elements, supervision, charged)
        result = chunked(*case, loss, 3)
        torch.testing.assert_close(result.loss, definition_loss(*case, loss))
        assert all(g.isfinite().all() for g in torch.autograd.grad(result.loss, (hidden, head)))
    assert chunked(hidden, head, elements, supervision, charged, LkAlpha(), 3).loss == 0


@pytest.mark.parametrize("loss", [CrossEntropy(), KLDivergence()], ids=lambda loss: loss.kind)
def test_probabilities_that_do_not_sum_to_one_still_match_the_definition(loss):
    """A cache may round probabilities; the gradient must still be that of the definition."""
    hidden, head, elements, supervision, charged = make_case(8)
    rounded = ProbsSupervision(
        supervision.probs_SW.bfloat16().double(), supervision.mask_S, supervision.slot_M
    )
    assert_matches_definition((hidden, head, elements, rounded, charged), loss, 3)


def test_the_reduced_head_scores_like_the_full_head():
    """Every step between states and logits is kept: bias, scale, divisor, soft cap."""
    torch.manual_seed(0)
    head = TargetHead(torch.randn(20, 6), torch.randn(20), scale=1.5, softcap=2.0, divisor=3.0)
    ids_W, member_V = torch.tensor([1, 4, 5, 17]), torch.zeros(20, dtype=torch.bool)
    member_V[ids_W] = True
    vocabulary = VocabularyTensors(ids_W, member_V)
    hidden_SD, slot_M = torch.randn(9, 6), torch.tensor([2, 3, 8])
    supervision = HiddenSupervision(
        hidden_SD, slot_M, head, head_rows(head, vocabulary), vocabulary
    )
    probs, covered = target_distribution_from_hidden(hidden_SD[slot_M], head, ids_W, member_V)
    torch.testing.assert_close(supervision.probs(0, 3), probs)
    assert torch.equal(supervision.coverage(), covered)
