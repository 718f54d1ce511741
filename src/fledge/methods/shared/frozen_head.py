"""Loss, metrics and gradients through a frozen head: one sweep over the vocabulary.

    row loss = text_weight * CE(q, the text's token) + distance_weight * |q - p|

with q = softmax(head(state) + token head(previous token)) and p the target's distribution. While a
chunk's logits exist, they yield the losses and are then replaced by their own gradient, which is
propagated through the head at once: two products with the vocabulary, none of them repeated, and no
gradient of the head. No [elements, W] tensor outlives its chunk. A token head
(`methods/block/heads.py`) consists of two thin factors, and both are trained.

`head_loss.py` does the same for heads that are trained and for the other losses. As there, elements
are sorted by the slot that holds their target.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gate import kernel_runs
from fledge.methods.shared.supervision import CHUNK_SCORES, Supervision
from fledge.rollout.plan import HeadElements

TokenFactors = tuple[Tensor, Tensor]  # features [N, R] of the elements' previous tokens, and [W, R]
Weigh = Callable[[Tensor], Tensor]  # row losses [N] -> their weights


@dataclass(frozen=True)
class TokenTask:
    """Which elements are scored, and against what."""

    elements: HeadElements
    label_N: Tensor  # the text's tokens, as draft ids
    text_weight: float = 1.0
    distance_weight: float = 0.0
    supervision: Supervision | None = None  # needed if the distance has a weight
    chunk_rows: int | None = None  # None: as many as fit


@dataclass(frozen=True)
class TokenScores:
    loss: Tensor  # sum over elements of coefficient * row loss, differentiable
    row_loss_N: Tensor
    correct_N: Tensor  # bool: the draft's top token is the text's token
    distance_N: Tensor  # |q - p|; 0 if the distance has no weight
    coefficient_N: Tensor


def frozen_head_loss(
    hidden_PE: Tensor,
    head_WE: Tensor,
    task: TokenTask,
    *,
    coefficient_N: Tensor | None = None,
    weigh: Weigh | None = None,
    token: TokenFactors | None = None,
) -> TokenScores:
    """Score all elements. Their weights are given (`coefficient_N`) or computed from all row losses
    (`weigh`, through which no gradient flows). The latter needs no second sweep, because gradients
    of states can be scaled afterwards; those of a trained factor could not."""
    assert (coefficient_N is None) != (weigh is None)
    assert token is None or weigh is None, "a token head needs the coefficients beforehand"
    features_NR, out_WR = token or (None, None)
    return TokenScores(
        *_FrozenHead.apply(  # type: ignore[no-untyped-call]
            hidden_PE, features_NR, out_WR, head_WE, task, coefficient_N, weigh,
            torch.is_grad_enabled(),
        )
    )  # fmt: skip


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        features_NR: Tensor | None,
        out_WR: Tensor | None,
        head_WE: Tensor,
        task: TokenTask,
        coefficient_N: Tensor | None,
        weigh: Weigh | None,
        with_grad: bool,
    ) -> tuple[Tensor, ...]:
        sweep = _Sweep(hidden_PE, head_WE, task, features_NR, out_WR, with_grad=with_grad)
        row_loss_N, correct_N, distance_N = sweep.run(coefficient_N)
        if weigh is not None:
            coefficient_N = weigh(row_loss_N)
            sweep.scale(coefficient_N)
        assert coefficient_N is not None
        loss = (row_loss_N * coefficient_N).sum()
        ctx.save_for_backward(*sweep.gradients())
        ctx.mark_non_differentiable(row_loss_N, correct_N, distance_N, coefficient_N)
        return loss, row_loss_N, correct_N, distance_N, coefficient_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if g is None else g * grads[0].to(g.dtype) for g in ctx.saved_tensors)
        return *scaled, None, None, None, None, None


class _Sweep:
    """One pass over the elements, and the gradients that it computes."""

    def __init__(
        self,
        hidden_PE: Tensor,
        head_WE: Tensor,
        task: TokenTask,
        features_NR: Tensor | None,
        out_WR: Tensor | None,
        *,
        with_grad: bool,
    ) -> None:
        self.hidden_PE, self.task, self.features_NR = hidden_PE, task, features_NR
        dtype = hidden_PE.dtype
        self.wide = torch.promote_types(dtype, torch.float32)
        self.head, self.out_WR = head_WE.to(dtype), out_WR
        self.token_out = None if out_WR is None else out_WR.to(dtype)
        self.dhidden_PE = torch.zeros_like(hidden_PE) if with_grad else None
        self.dfeatures_NR = self.dout_WR = None
        if with_grad and features_NR is not None and out_WR is not None:
            self.dfeatures_NR = torch.zeros_like(features_NR)
            self.dout_WR = torch.zeros_like(out_WR, dtype=self.wide)

    def gradients(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dout = self.dout_WR
        if dout is not None and self.out_WR is not None:
            dout = dout.to(self.out_WR.dtype)
        return self.dhidden_PE, self.dfeatures_NR, dout

    def scale(self, coefficient_N: Tensor) -> None:
        """Scale the gradients of the states, which were computed with coefficients of 1."""
        if self.dhidden_PE is not None:
            scale_P = coefficient_N.new_zeros(len(self.hidden_PE))
            scale_P[self.task.elements.element_N] = coefficient_N
            self.dhidden_PE.mul_(scale_P[:, None].to(self.dhidden_PE.dtype))

    def run(self, coefficient_N: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Row losses, hits and distances."""
        elements, count = self.task.elements, len(self.task.elements)
        row_loss_N = self.hidden_PE.new_zeros(count, dtype=self.wide)
        correct_N = torch.zeros_like(row_loss_N, dtype=torch.bool)
        distance_N = torch.zeros_like(row_loss_N)
        if coefficient_N is None:
            coefficient_N = torch.ones_like(row_loss_N)
        rows = self.task.chunk_rows or self._chunk_rows()
        for part, slots in elements.chunks(rows):
            element_J = elements.element_N[part]
            logits_JW = self._logits(element_J, part)
            scored = self._score(logits_JW, part, slots, coefficient_N[part])
            row_loss_N[part], correct_N[part], distance_N[part], dlogits_JW = scored
            self._backpropagate(dlogits_JW, element_J, part)
            del logits_JW, scored, dlogits_JW  # before the next chunk: each takes half a gigabyte
        correct_N &= row_loss_N.isfinite()
        return row_loss_N, correct_N, distance_N

    def _chunk_rows(self) -> int:
        # the kernel makes no fp32 copies of the logits
        copies_avoided = 4 if kernel_runs(self.hidden_PE, what="head loss") else 1
        return max(1, copies_avoided * CHUNK_SCORES // len(self.head))

    def _logits(self, element_J: Tensor, part: slice) -> Tensor:
        logits_JW = F.linear(self.hidden_PE.index_select(0, element_J), self.head)
        if self.features_NR is not None and self.token_out is not None:
            logits_JW.addmm_(self.features_NR[part], self.token_out.t())
        return logits_JW

    def _backpropagate(self, dlogits_JW: Tensor, element_J: Tensor, part: slice) -> None:
        if self.dhidden_PE is None:
            return
        self.dhidden_PE.index_copy_(0, element_J, dlogits_JW @ self.head)
        if self.dfeatures_NR is not None and self.dout_WR is not None:
            assert self.features_NR is not None
            assert self.token_out is not None
            self.dfeatures_NR[part] = dlogits_JW @ self.token_out
            self.dout_WR += dlogits_JW.t() @ self.features_NR[part]

    def _score(
        self, logits_JW: Tensor, part: slice, slots: slice, coefficient_J: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Row losses, hits, distances, and coefficient * gradient [J, W]; the logits are
        overwritten."""
        task, label_J = self.task, self.task.label_N[part]
        probs_MW, slot_J = self._probs(part, slots)
        if kernel_runs(logits_JW, what="head loss"):
            from fledge.kernels.head_rows import fused_text_rows

            scores = fused_text_rows(
                logits_JW, probs_MW, slot_J, label_J, coefficient_J,
                text_weight=task.text_weight, distance_weight=task.distance_weight,
            )  # fmt: skip
            return *scores, logits_JW
        probs_JW = None
        if probs_MW is not None and slot_J is not None:
            probs_JW = probs_MW.index_select(0, slot_J)
        wide_JW = logits_JW.to(self.wide)
        correct_J = wide_JW.argmax(-1) == label_J
        loss_J, distance_J, dlogits_JW = text_rows(
            wide_JW, label_J, probs_JW, task.text_weight, task.distance_weight
        )
        dlogits_JW = dlogits_JW.mul_(coefficient_J[:, None].to(self.wide)).to(logits_JW.dtype)
        return loss_J, correct_J, distance_J, dlogits_JW

    def _probs(self, part: slice, slots: slice) -> tuple[Tensor | None, Tensor | None]:
        """The target's distributions that a chunk needs, and each element's row among them."""
        task = self.task
        if task.distance_weight == 0:
            return None, None
        assert task.supervision is not None
        probs_MW = task.supervision.probs(slots.start, slots.stop).to(self.wide)
        return probs_MW, task.elements.target_N[part] - slots.start


def text_rows(
    logits_JW: Tensor,
    label_J: Tensor,
    probs_JW: Tensor | None,
    text_weight: float,
    distance_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [J], distances [J] and the gradient of the logits; the logits are overwritten."""
    lse_J1 = logits_JW.logsumexp(dim=-1, keepdim=True)
    label_J1 = label_J[:, None]
    loss_J = text_weight * (lse_J1 - logits_JW.gather(1, label_J1)).squeeze(-1)
    q_JW = logits_JW.sub_(lse_J1).exp_()
    if probs_JW is None:
        gradient_JW = q_JW.mul_(text_weight)
        distance_J = torch.zeros_like(loss_J)
    else:
        difference_JW = q_JW - probs_JW
        distance_J = difference_JW.abs().sum(-1)
        sign_JW = difference_JW.sign_()
        mean_J1 = (q_JW * sign_JW).sum(-1, keepdim=True)
        factor_JW = sign_JW.sub_(mean_J1).mul_(distance_weight).add_(text_weight)
        gradient_JW = q_JW.mul_(factor_JW)
        loss_J = loss_J + distance_weight * distance_J
    minus_J1 = torch.full_like(label_J1, -text_weight, dtype=gradient_JW.dtype)
    return loss_J, distance_J, gradient_JW.scatter_add_(1, label_J1, minus_J1)
