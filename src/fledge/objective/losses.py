"""The losses, as definitions: plain autograd on draft logits and target probabilities, [N, W].

Each takes rows and gives one number a row; `reference_loss` adds them up as a depth does. The
chunked head (`head_loss.py`) computes the same with its gradients written out, and is tested
against these lines.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

LossKind = Literal["ce", "kl", "hard", "alpha", "lambda"]


@dataclass(frozen=True)
class LossSpec:
    """Which loss: soft cross entropy, KL, cross entropy with the target's top token, LK (two)."""

    kind: LossKind = "ce"
    kl_scale: float = 1.0  # lambda only: weight of CE at no acceptance
    kl_decay: float = 3.0  # lambda only: how fast that weight fades as acceptance grows

    def __post_init__(self) -> None:
        if self.kind not in get_args(LossKind):
            raise ValueError(f"loss: must be one of {get_args(LossKind)}, got {self.kind!r}")
        if not 0 <= self.kl_scale <= 1:
            raise ValueError(f"lk_kl_scale: must be in [0, 1], got {self.kl_scale!r}")
        if not self.kl_decay >= 0:
            raise ValueError(f"lk_kl_decay: must be >= 0, got {self.kl_decay!r}")

    def ce_weight(self, mean_alpha: Tensor) -> Tensor:
        """The share of CE in the lambda loss, no gradient."""
        return self.kl_scale * torch.exp(-self.kl_decay * mean_alpha.detach())


def loss_spec(
    loss: LossKind, lk_loss_type: str | None, lk_kl_scale: float, lk_kl_decay: float
) -> LossSpec:
    """The loss as trainer modules are told it: `lk_loss_type` replaces `loss`."""
    kinds: dict[str | None, LossKind] = {None: loss, "alpha": "alpha", "lambda": "lambda"}
    if lk_loss_type not in kinds:
        raise ValueError(f"lk_loss_type: 'alpha', 'lambda' or None, got {lk_loss_type!r}")
    return LossSpec(kinds[lk_loss_type], lk_kl_scale, lk_kl_decay)


def soft_cross_entropy(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    return -(probs_NW * F.log_softmax(logits_NW, dim=-1)).sum(-1)


def kl_divergence(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    """KL(target || draft): the cross entropy less the target's own entropy."""
    return soft_cross_entropy(logits_NW, probs_NW) + torch.xlogy(probs_NW, probs_NW).sum(-1)


def hard_cross_entropy(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    return F.cross_entropy(logits_NW, probs_NW.argmax(-1), reduction="none")


def acceptance(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    """alpha = sum min(p, q): the chance that speculative sampling accepts the draft's token."""
    return torch.minimum(probs_NW, torch.softmax(logits_NW, dim=-1)).sum(-1)


def log_acceptance_loss(logits_NW: Tensor, probs_NW: Tensor) -> Tensor:
    """-log alpha; 0 where alpha is 0, which has no direction to offer."""
    alpha = acceptance(logits_NW, probs_NW)
    return -torch.where(alpha > 0, alpha, 1.0).log()


def reference_loss(
    logits_NW: Tensor, probs_NW: Tensor, charged_N: Tensor, spec: LossSpec
) -> Tensor:
    """The loss of one depth: the mean over charged rows; 0 when there are none."""
    logits_NW, probs_NW = logits_NW[charged_N], probs_NW[charged_N].to(logits_NW.dtype)
    count = max(len(logits_NW), 1)
    if spec.kind == "lambda":
        alpha_N = acceptance(logits_NW, probs_NW)
        weight = spec.ce_weight(alpha_N.sum() / count)
        ce_N = soft_cross_entropy(logits_NW, probs_NW)
        return (weight * ce_N + (1 - weight) * (1 - alpha_N)).sum() / count
    rows = {
        "ce": soft_cross_entropy,
        "kl": kl_divergence,
        "hard": hard_cross_entropy,
        "alpha": log_acceptance_loss,
    }[spec.kind]
    return rows(logits_NW, probs_NW).sum() / count
