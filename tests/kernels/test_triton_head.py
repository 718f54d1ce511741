"""The GPU kernel of the head's loss against the torch version; interpreted without a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import interpreted_triton  # before the kernels
from fledge.kernels import head_rows as triton_head
from fledge.kernels.head_rows import fused_rows
from fledge.methods.losses.registry import LOSSES
from fledge.methods.shared import head_loss as head_loss_module
from fledge.methods.shared.head_loss import _score, _Targets, text_rows
from objective.test_head_loss import chunked, make_case, make_loss

DEVICE = interpreted_triton.DEVICE
KINDS = [kind for kind in LOSSES if LOSSES[kind].kernel is not None]


def make_rows(count, width, *, slots=3, dtype=torch.float32, seed=0):
    """Logits close to the target's, so that acceptance is not 0, with shared target slots."""
    g = torch.Generator().manual_seed(seed)
    target = 2 * torch.randn(slots, width, generator=g)
    slot = torch.randint(0, slots, (count,), generator=g)
    logits = target[slot] + torch.randn(count, width, generator=g)
    probs = torch.softmax(target, -1).to(DEVICE)
    slot = slot.to(DEVICE)
    coefficient = torch.rand(count, generator=g).to(DEVICE)
    ce_weight = torch.rand(count, generator=g).to(DEVICE)
    targets = _Targets(probs, slot, probs.argmax(-1)[slot])
    return logits.to(DEVICE, dtype), targets, coefficient, ce_weight


def by_torch(logits, targets, kind, coefficient, ce_weight):
    """The torch version in `head_loss`, which runs when no kernel is allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_loss_module, "kernel_runs", lambda x, *, what: False)
        loss = LOSSES[kind]()
        weight = ce_weight if loss.needs_acceptance else None
        loss_J, correct_J, _, dlogits_JW = _score(
            logits.clone(), targets, loss, coefficient, weight
        )
        return loss_J, correct_J, dlogits_JW


def by_kernel(logits, targets, kind, coefficient, ce_weight):
    grads = logits.clone()
    loss, correct, _ = fused_rows(
        grads, targets.slots_MW, targets.slot_J, targets.label_J, kind=LOSSES[kind].kernel,
        coefficient_J=coefficient, ce_weight_J=ce_weight,
    )  # fmt: skip
    return loss, correct, grads


def assert_kernel_matches_torch(kind, case, tolerance=1e-5):
    logits, targets, coefficient, ce_weight = case
    actual = by_kernel(logits, targets, kind, coefficient, ce_weight)
    expected = by_torch(logits, targets, kind, coefficient, ce_weight)
    torch.testing.assert_close(actual[0], expected[0], rtol=tolerance, atol=tolerance)
    assert torch.equal(actual[1], expected[1])
    torch.testing.assert_close(actual[2], expected[2], rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 512, 4096, 5000])
def test_kernel_matches_torch(kind, width):
    assert_kernel_matches_torch(kind, make_rows(4, width))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(KINDS),
    width=st.integers(2, 150),
    count=st.integers(1, 6),
    block=st.sampled_from([16, 64]),
    seed=st.integers(0, 999),
)
def test_kernel_matches_torch_for_any_sizes(kind, width, count, block, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_head, "BLOCK", block)
        assert_kernel_matches_torch(kind, make_rows(count, width, seed=seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_error_is_at_most_twice_that_of_torch(kind, dtype):
    logits, targets, coefficient, ce_weight = make_rows(6, 700, dtype=dtype)
    exact = _Targets(targets.slots_MW.double(), targets.slot_J, targets.label_J)
    truth = by_torch(logits.double(), exact, kind, coefficient.double(), ce_weight.double())
    actual = by_kernel(logits, targets, kind, coefficient, ce_weight)
    torch_result = by_torch(logits, targets, kind, coefficient, ce_weight)
    assert actual[2].dtype == dtype
    assert (actual[2] - truth[2]).norm() <= 2 * (torch_result[2] - truth[2]).norm()
    torch.testing.assert_close(actual[0].double(), truth[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block", [16, 64])
def test_the_first_of_equal_logits_is_the_top(monkeypatch, block):
    """Ties within one block of columns, and across two."""
    monkeypatch.setattr(triton_head, "BLOCK", block)
    logits, targets, coefficient, ce_weight = make_rows(3, 40)
    logits[:] = torch.arange(40, device=DEVICE) // 10
    for top in (30, 31):
        tied = _Targets(targets.slots_MW, targets.slot_J, torch.full_like(targets.label_J, top))
        assert by_kernel(logits, tied, "ce", coefficient, ce_weight)[1].tolist() == [top == 30] * 3


def test_zero_acceptance_gives_zero_gradient():
    """With alpha == 0, the loss and its gradient are 0, not infinite."""
    probs = torch.zeros(1, 20, device=DEVICE)
    probs[0, 3] = 1.0
    zero = torch.zeros(2, dtype=torch.long, device=DEVICE)
    logits = torch.zeros(2, 20, device=DEVICE)
    logits[:, 0] = 1e4
    targets = _Targets(probs, zero, zero + 3)
    loss, _, grads = by_kernel(logits, targets, "lk_alpha", torch.ones(2, device=DEVICE), None)
    assert loss.tolist() == [0, 0]
    assert not grads.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(DEVICE != "cpu", reason="test_head_loss's cases live on the CPU")
def test_whole_head_through_the_kernel(kind, monkeypatch):
    """Loss, metrics and gradients of `head_loss`, with and without the kernel."""
    hidden, head, elements, supervision, charged = make_case(17, dtype=torch.float32)
    case = (hidden, head, elements, supervision, charged)
    loss = make_loss(kind)
    expected = chunked(*case, loss, 5)
    expected_grads = torch.autograd.grad(expected.loss, (hidden, head))
    monkeypatch.setattr(head_loss_module, "kernel_runs", lambda x, *, what: True)
    actual = chunked(*case, loss, 5)
    torch.testing.assert_close(actual.row_loss_N, expected.row_loss_N, rtol=1e-5, atol=1e-6)
    assert torch.equal(actual.correct_N, expected.correct_N)
    for got, want in zip(
        torch.autograd.grad(actual.loss, (hidden, head)), expected_grads, strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


# --- rows of a frozen head, scored against the text -----------------------------------------------

WEIGHTS = [(1.0, 0.0), (0.1, 0.9), (0.0, 0.5)]


def make_text_rows(width, dtype=torch.float32, rows=6):
    g = torch.Generator().manual_seed(width)
    logits = (torch.randn(rows, width, generator=g) * 3).to(DEVICE, dtype)
    probs = (torch.randn(4, width, generator=g) * 3).softmax(-1).to(DEVICE)
    slot = torch.tensor([0, 0, 1, 2, 3, 3], device=DEVICE)
    label = torch.randint(0, width, (rows,), generator=g).to(DEVICE)
    coefficient = torch.rand(rows, generator=g).to(DEVICE)
    label[0] = logits[0].float().argmax()
    return logits, probs, slot, label, coefficient


@pytest.mark.parametrize(("text", "far"), WEIGHTS)
@pytest.mark.parametrize("width", [1, 100, 4096, 5000])
def test_text_kernel_matches_torch(width, text, far):
    logits, probs, slot, label, coefficient = make_text_rows(width)
    target = (probs, slot) if far else (None, None)
    expected = text_rows(logits.clone(), label, probs[slot] if far else None, text, far)
    correct = logits.argmax(-1) == label
    actual = fused_rows(
        logits, *target, label, kind="hard", coefficient_J=coefficient,
        text_weight=text, distance_weight=far or None,
    )  # fmt: skip
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], correct)
    if far:
        torch.testing.assert_close(actual[2], expected[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, expected[2] * coefficient[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("text", "far"), WEIGHTS)
def test_text_rows_in_torch_match_the_definition(text, far):
    logits, probs, slot, label, _ = (x.cpu() for x in make_text_rows(50))
    logits, probs = logits.double().requires_grad_(), probs.double()[slot]
    q = logits.softmax(-1)
    distance = (q - probs).abs().sum(-1)
    loss = text * -q.log().gather(1, label[:, None])[:, 0] + far * distance
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    actual = text_rows(logits.detach().clone(), label, probs if far else None, text, far)
    torch.testing.assert_close(actual[0], loss)
    if far:
        torch.testing.assert_close(actual[1], distance)
    torch.testing.assert_close(actual[2], gradient)


def test_text_rows_of_bf16_logits():
    logits, probs, slot, label, coefficient = make_text_rows(300, torch.bfloat16)
    exact = text_rows(logits.double(), label, probs.double()[slot], 0.1, 0.9)
    actual = fused_rows(
        logits, probs, slot, label, kind="hard", coefficient_J=coefficient,
        text_weight=0.1, distance_weight=0.9,
    )  # fmt: skip
    torch.testing.assert_close(actual[0].double(), exact[0], rtol=1e-4, atol=1e-4)
    exact_grad = exact[2] * coefficient[:, None]
    rounded = exact_grad.to(torch.bfloat16).double()
    assert (logits.double() - exact_grad).norm() <= 2 * (rounded - exact_grad).norm()
