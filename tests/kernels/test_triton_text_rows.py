"""The kernel of the frozen head's rows against the torch version, and that against autograd."""

import pytest
import torch

import interpreted_triton  # before the kernels
from fledge.kernels.head_rows import fused_text_rows
from fledge.methods.shared.head_loss import text_rows

DEVICE = interpreted_triton.DEVICE
WEIGHTS = [(1.0, 0.0), (0.1, 0.9), (0.0, 0.5)]


def make_case(width, dtype=torch.float32, rows=6):
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
def test_kernel_matches_torch(width, text, far):
    logits, probs, slot, label, coefficient = make_case(width)
    target = (probs, slot) if far else (None, None)
    expected = text_rows(logits.clone(), label, probs[slot] if far else None, text, far)
    correct = logits.argmax(-1) == label
    actual = fused_text_rows(
        logits, *target, label, coefficient, text_weight=text, distance_weight=far
    )
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], correct)
    torch.testing.assert_close(actual[2], expected[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits, expected[2] * coefficient[:, None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("text", "far"), WEIGHTS)
def test_the_torch_version_matches_the_definition(text, far):
    logits, probs, slot, label, _ = (x.cpu() for x in make_case(50))
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


def test_bf16_logits():
    logits, probs, slot, label, coefficient = make_case(300, torch.bfloat16)
    exact = text_rows(logits.double(), label, probs.double()[slot], 0.1, 0.9)
    actual = fused_text_rows(
        logits, probs, slot, label, coefficient, text_weight=0.1, distance_weight=0.9
    )
    torch.testing.assert_close(actual[0].double(), exact[0], rtol=1e-4, atol=1e-4)
    exact_grad = exact[2] * coefficient[:, None]
    rounded = exact_grad.to(torch.bfloat16).double()
    assert (logits.double() - exact_grad).norm() <= 2 * (rounded - exact_grad).norm()
