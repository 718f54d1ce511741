"""Draft head, loss, metrics and gradients, in chunks: no [elements, W] tensor outlives its chunk.

Gradients are hand-written and computed in the forward pass: while a chunk's logits exist, they
yield the losses and are then replaced by their own gradient, which is propagated through the head
at once. The backward pass only scales what was saved: [elements, E] for the states, [W, E] for a
head that is trained, and the two thin factors of a token head (`methods/block/draft.py`).

Elements are sorted by the slot that holds their target (`rollout.plan.HeadElements`), so a chunk
needs a short range of target slots and derives each slot's distribution once for all depths.

`head_loss` scores against the target's distribution with a `losses.base.Loss`; `frozen_head_loss`
against the text, for heads that are not trained:

    row loss = text_weight * CE(q, the text's token) + distance_weight * |q - p|

with q = softmax(head(state) + token head(previous token)) and p the target's distribution. The same
sweep can charge the logits without the token head's term (`plain_N`), and return the best tokens of
every element with differentiable logits (`TopTokens`), for heads that choose among these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fledge.core.head import CHUNK_SCORES, rows_at_a_time
from fledge.core.products import add_product, matmul
from fledge.kernels.gate import kernel_runs
from fledge.methods.losses.base import Loss, acceptance
from fledge.methods.shared.best_tokens import BestTokens, Candidates, TopTokens
from fledge.methods.shared.supervision import Supervision
from fledge.rollout.plan import HeadElements


@dataclass(frozen=True)
class HeadLoss:
    loss: Tensor  # sum over elements of coefficient * row loss, differentiable
    row_loss_N: Tensor  # per element, before the coefficient; elements as in `HeadElements`
    correct_N: Tensor  # bool: the draft's top token is the target's, or the text's
    distance_N: Tensor  # |q - p|; 0 if the distance has no weight
    coefficient_N: Tensor
    pick_N: Tensor | None = None  # the draft's top token, if asked for
    candidates: Candidates | None = None


TokenFactors = tuple[Tensor, Tensor]  # features [N, R] of the elements' previous tokens, and [W, R]
Weigh = Callable[[Tensor], Tensor]  # row losses [N] -> their weights
# Of a chunk: row losses, hits and perhaps distances [J], and coefficient * gradient [J, W].
Scores = tuple[Tensor, Tensor, Tensor | None, Tensor]


# --- one sweep over the vocabulary ---------------------------------------------------------------


@dataclass(frozen=True)
class _Targets:
    """What the elements of a chunk are scored against; slots are shared between depths."""

    slots_MW: Tensor | None  # the target's probabilities, if the loss reads them
    slot_J: Tensor | None  # each element's row of `slots_MW`
    label_J: Tensor  # the text's token, or the target's top token

    def per_element(self) -> Tensor:
        """The target's probabilities [J, W], one row per element."""
        assert self.slots_MW is not None
        assert self.slot_J is not None
        return self.slots_MW.index_select(0, self.slot_J)


@dataclass(frozen=True)
class _Sweep:
    """How the elements are scored. `read` takes a chunk's slices of the elements and of the target
    slots that they need; `score` the chunk's logits, which it may overwrite, and the weights of its
    rows."""

    elements: HeadElements
    chunk_rows: int
    read: Callable[[slice, slice], _Targets]
    score: Callable[[Tensor, _Targets, slice, Tensor], Scores]
    coefficient_N: Tensor | None  # None: `weigh` computes them from all row losses
    weigh: Weigh | None = None
    plain_N: Tensor | None = None  # weights of the logits without the token head's term
    picks: bool = False
    top: TopTokens | None = None
    with_grad: bool = True

    def apply(
        self, hidden_PE: Tensor, head_WE: Tensor, token: TokenFactors | None = None
    ) -> HeadLoss:
        factors = token or (None, None)
        values: tuple[Any, ...] = _SweepHead.apply(hidden_PE, head_WE, *factors, self)  # type: ignore[no-untyped-call]
        found = None if self.top is None else Candidates(*values[6:])
        loss, row_loss_N, correct_N, distance_N, coefficient_N, pick_N = values[:6]
        return HeadLoss(loss, row_loss_N, correct_N, distance_N, coefficient_N, pick_N, found)


class _SweepHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        head_WE: Tensor,
        features_NR: Tensor | None,
        out_WR: Tensor | None,
        sweep: _Sweep,
    ) -> tuple[Tensor | None, ...]:
        wide, dtype, elements = _wide(hidden_PE), hidden_PE.dtype, sweep.elements
        head, token_out = head_WE.to(dtype), None if out_WR is None else out_WR.to(dtype)
        leaves = (hidden_PE, head_WE, features_NR, out_WR)
        dhidden_PE, dhead_WE, dfeatures_NR, dout_WR = (
            torch.zeros_like(x, dtype=sums) if x is not None and want and sweep.with_grad else None
            for x, want, sums in zip(
                leaves, ctx.needs_input_grad, (None, wide, None, wide), strict=False
            )
        )
        row_loss_N = hidden_PE.new_zeros(len(elements), dtype=wide)
        distance_N, correct_N = torch.zeros_like(row_loss_N), row_loss_N.bool()
        plain_loss_N = torch.zeros_like(row_loss_N)
        pick_N = torch.zeros_like(elements.depth_N) if sweep.picks else None
        best = None
        if sweep.top is not None:
            best = BestTokens(sweep.top, hidden_PE, elements, with_grad=dhidden_PE is not None)
        coefficient_N = sweep.coefficient_N
        if coefficient_N is None:
            coefficient_N = torch.ones_like(row_loss_N)
        for part, slots in elements.chunks(sweep.chunk_rows):
            element_J = elements.element_N[part]
            x_JE = hidden_PE.index_select(0, element_J)
            logits_JW, dplain_JW = matmul(x_JE, head.t()), None
            targets = sweep.read(part, slots)
            if sweep.plain_N is not None:
                plain = sweep.score(logits_JW.clone(), targets, part, sweep.plain_N[part])
                plain_loss_N[part], dplain_JW = plain[0], plain[3]
                del plain
            if features_NR is not None and token_out is not None:
                add_product(logits_JW, features_NR[part], token_out.t())
            if pick_N is not None:
                pick_N[part] = logits_JW.argmax(-1)
            if best is not None:
                probs_JW = targets.per_element() if best.top.target else None
                best.take(part, logits_JW, head, targets.label_J, probs_JW)
            scored = sweep.score(logits_JW, targets, part, coefficient_N[part])
            row_loss_N[part], correct_N[part], distance_J, dlogits_JW = scored
            if distance_J is not None:
                distance_N[part] = distance_J
            if dfeatures_NR is not None and token_out is not None:
                dfeatures_NR[part] = matmul(dlogits_JW, token_out)
            if dout_WR is not None and features_NR is not None:
                _add_product(dout_WR, dlogits_JW, features_NR[part])
            if dplain_JW is not None:
                dlogits_JW += dplain_JW
            if dhidden_PE is not None:
                dhidden_PE.index_copy_(0, element_J, matmul(dlogits_JW, head))
            if dhead_WE is not None:
                _add_product(dhead_WE, dlogits_JW, x_JE)
            # before the next chunk: each takes half a gigabyte
            del logits_JW, scored, dlogits_JW, dplain_JW
        correct_N &= row_loss_N.isfinite()  # the argmaxes of two NaN rows agree
        if sweep.weigh is not None:
            coefficient_N = sweep.weigh(row_loss_N)
            if dhidden_PE is not None:  # it was computed with coefficients of 1
                scale_P = coefficient_N.new_zeros(len(hidden_PE))
                scale_P[elements.element_N] = coefficient_N
                dhidden_PE.mul_(scale_P[:, None].to(dtype))
        loss = (row_loss_N * coefficient_N).sum()
        if sweep.plain_N is not None:
            loss = loss + (plain_loss_N * sweep.plain_N).sum()
        if dhead_WE is not None:
            dhead_WE = dhead_WE.to(head_WE.dtype)
        if dout_WR is not None and out_WR is not None:
            dout_WR = dout_WR.to(out_WR.dtype)
        ctx.best, ctx.head, ctx.elements = best, None if best is None else head, elements
        ctx.save_for_backward(dhidden_PE, dhead_WE, dfeatures_NR, dout_WR)
        found = () if best is None else best.results()
        values = (loss, row_loss_N, correct_N, distance_N, coefficient_N, pick_N, *found)
        smooth = (0, 7, 9)  # the loss, the candidates' logits and their normalizer
        fixed = (x for i, x in enumerate(values) if x is not None and i not in smooth)
        ctx.mark_non_differentiable(*fixed)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # scale in place, without a second copy of the head's gradient, unless the graph is retained
        multiply = (
            torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else Tensor.mul_
        )
        scaled = [
            None if grad is None else multiply(grad, grads[0].to(grad.dtype))
            for grad in ctx.saved_tensors
        ]
        if ctx.best is not None and scaled[0] is not None:
            ctx.best.add_gradient(scaled[0], ctx.head, grads[7], grads[9])
        return *scaled, None


def _add_product(into_WE: Tensor, dlogits_JW: Tensor, x_JE: Tensor) -> None:
    """into += dlogits.T @ x. On a GPU the product itself accumulates in the fp32 of `into`."""
    if into_WE.is_cuda and into_WE.dtype == torch.float32 != x_JE.dtype:
        left_WJ = dlogits_JW.t()
        torch.addmm(into_WE, left_WJ, x_JE, out_dtype=torch.float32, out=into_WE)
    elif into_WE.dtype == x_JE.dtype:
        add_product(into_WE, dlogits_JW.t(), x_JE)
    else:
        into_WE += dlogits_JW.t() @ x_JE


def _wide(hidden_PE: Tensor) -> torch.dtype:
    """The dtype in which losses are computed: at least fp32."""
    return torch.promote_types(hidden_PE.dtype, torch.float32)


def _chunk_rows(hidden_PE: Tensor, width: int, *, has_kernel: bool) -> int:
    """As many rows as fit the memory of a chunk: more with the kernel, which makes no fp32 copies
    of the logits."""
    if hidden_PE.device.type == "cpu":
        return rows_at_a_time(hidden_PE.device, width)
    fused = has_kernel and kernel_runs(hidden_PE, what="head loss")
    copies_avoided = 4 if fused else 1
    return max(1, copies_avoided * CHUNK_SCORES // width)


# --- against the target's distribution -----------------------------------------------------------


@dataclass(frozen=True)
class HeadTask:
    """Which elements are scored, against which supervision, with which loss."""

    elements: HeadElements
    supervision: Supervision
    charged_N: Tensor  # bool
    loss: Loss
    # the number of depths, if each is a loss with its own mean; 1, if all elements form one loss.
    # Read only for losses that are weighted by mean acceptance
    num_losses: int
    chunk_rows: int | None = None  # None: as many as fit

    def which_loss(self) -> Tensor:
        """[N] index of the loss that each element belongs to."""
        depth_N = self.elements.depth_N
        return depth_N if self.num_losses > 1 else torch.zeros_like(depth_N)

    def rows_of_chunk(self, hidden_PE: Tensor, width: int) -> int:
        has_kernel = self.loss.kernel is not None
        return self.chunk_rows or _chunk_rows(hidden_PE, width, has_kernel=has_kernel)


def head_loss(
    hidden_PE: Tensor,
    head_WE: Tensor,
    task: HeadTask,
    *,
    coefficient_N: Tensor,  # weight of each row's loss, where it is charged
    acceptance_L: Tensor | None = None,
    top: TopTokens | None = None,
) -> HeadLoss:
    """Score all elements. `hidden_PE` [rows of all depths, E] are the states after the final norm.

    `acceptance_L` is the mean acceptance of each loss, for losses that need it; None takes the mean
    over the elements of this call.
    `head_WE` may be an fp32 master weight in a bf16 step: it is cast to the states' dtype here, and
    its gradient is summed over the chunks in fp32.
    """
    weight_N = None
    if task.loss.needs_acceptance:
        if acceptance_L is None:
            acceptance_L = mean_acceptance(head_acceptance(hidden_PE, head_WE, task))
        weight_N = task.loss.weight(acceptance_L.to(_wide(hidden_PE)))[task.which_loss()]

    def read(part: slice, slots: slice) -> _Targets:
        return _targets(task, part, slots, _wide(hidden_PE))

    def score(logits_JW: Tensor, target: _Targets, part: slice, coefficient_J: Tensor) -> Scores:
        weight_J = None if weight_N is None else weight_N[part]
        return _score(logits_JW, target, task.loss, coefficient_J, weight_J)

    rows = task.rows_of_chunk(hidden_PE, len(head_WE))
    coefficient_N = torch.where(task.charged_N, coefficient_N, 0.0)
    with_grad = torch.is_grad_enabled()
    sweep = _Sweep(task.elements, rows, read, score, coefficient_N, top=top, with_grad=with_grad)
    return sweep.apply(hidden_PE, head_WE)


@torch.no_grad()
def head_acceptance(hidden_PE: Tensor, head_WE: Tensor, task: HeadTask) -> Tensor:
    """[2, L] float64: for each loss, the summed acceptance of its charged elements and their count.

    This is a separate pass over the logits. It costs a third of the head's work; keeping the
    gradients of both terms of a weighted loss apart would cost two thirds.
    """
    head = head_WE.to(hidden_PE.dtype)
    alpha_N = hidden_PE.new_zeros(len(task.elements), dtype=torch.float64)
    rows = task.rows_of_chunk(hidden_PE, len(head))
    for part, slots in task.elements.chunks(rows):
        logits_JW = matmul(hidden_PE.index_select(0, task.elements.element_N[part]), head.t())
        alpha_N[part] = _alpha(logits_JW, _targets(task, part, slots, _wide(hidden_PE))).double()
    values_2N = torch.stack([alpha_N, torch.ones_like(alpha_N)]) * task.charged_N
    return values_2N.new_zeros(2, task.num_losses).index_add_(1, task.which_loss(), values_2N)


def mean_acceptance(sums_2L: Tensor) -> Tensor:
    """[L] means from the sums of `head_acceptance`; 0 for a loss without elements."""
    return sums_2L[0] / sums_2L[1].clamp_min(1)


def _targets(task: HeadTask, part: slice, slots: slice, wide: torch.dtype) -> _Targets:
    slots_MW = task.supervision.probs(slots.start, slots.stop).to(wide)
    slot_J = task.elements.target_N[part] - slots.start
    return _Targets(slots_MW, slot_J, slots_MW.argmax(-1)[slot_J])


def _alpha(logits_JW: Tensor, target: _Targets) -> Tensor:
    """The probability [J] that speculative sampling accepts the draft's token."""
    if kernel_runs(logits_JW, what="head loss"):
        from fledge.kernels.head_rows import fused_rows

        slots = (target.slots_MW, target.slot_J, target.label_J)
        return fused_rows(logits_JW, *slots, kind="acceptance")[0]
    return acceptance(logits_JW.to(_wide(logits_JW)), target.per_element())


def _score(
    logits_JW: Tensor, target: _Targets, loss: Loss, coefficient_J: Tensor, weight_J: Tensor | None
) -> Scores:
    """The scores of a chunk; the logits are overwritten."""
    if loss.kernel is not None and kernel_runs(logits_JW, what="head loss"):
        from fledge.kernels.head_rows import fused_rows

        loss_J, correct_J, _ = fused_rows(
            logits_JW, target.slots_MW, target.slot_J, target.label_J, kind=loss.kernel,
            coefficient_J=coefficient_J, ce_weight_J=weight_J,
        )  # fmt: skip
        return loss_J, correct_J, None, logits_JW
    wide_JW = logits_JW.to(_wide(logits_JW))
    correct_J = wide_JW.argmax(-1) == target.label_J
    loss_J, dlogits_JW = loss.rows(wide_JW, target.per_element(), weight_J)
    return loss_J, correct_J, None, dlogits_JW.mul_(coefficient_J[:, None]).to(logits_JW.dtype)


# --- against the text, through a head that is not trained ----------------------------------------


@dataclass(frozen=True)
class TokenTask:
    """Which elements are scored, and against what."""

    elements: HeadElements
    label_N: Tensor | None  # the text's tokens, as draft ids; None: the target's top tokens
    text_weight: float = 1.0  # of the cross entropy with the label
    distance_weight: float = 0.0
    supervision: Supervision | None = None  # needed if the target's distribution is read
    chunk_rows: int | None = None  # None: as many as fit


def frozen_head_loss(
    hidden_PE: Tensor,
    head_WE: Tensor,
    task: TokenTask,
    *,
    coefficient_N: Tensor | None = None,
    weigh: Weigh | None = None,
    token: TokenFactors | None = None,
    plain_N: Tensor | None = None,
    picks: bool = False,
    top: TopTokens | None = None,
) -> HeadLoss:
    """Score all elements. Their weights are given (`coefficient_N`) or computed from all row losses
    (`weigh`, through which no gradient flows). The latter needs no second sweep, because gradients
    of states can be scaled afterwards; those of a trained factor could not."""
    assert (coefficient_N is None) != (weigh is None)
    assert (token is None and plain_N is None) or weigh is None, "coefficients come beforehand"

    rows = task.chunk_rows or _chunk_rows(hidden_PE, len(head_WE), has_kernel=True)
    reads_target = task.distance_weight > 0 or (top is not None and top.target)
    read = partial(_read_text, task, _wide(hidden_PE), reads_target=reads_target)
    sweep = _Sweep(
        task.elements, rows, read, partial(_score_text, task), coefficient_N, weigh, plain_N,
        picks, top, torch.is_grad_enabled(),
    )  # fmt: skip
    return sweep.apply(hidden_PE, head_WE.detach(), token)


def _read_text(
    task: TokenTask, wide: torch.dtype, part: slice, slots: slice, *, reads_target: bool
) -> _Targets:
    if task.label_N is not None and not reads_target:
        return _Targets(None, None, task.label_N[part])
    assert task.supervision is not None
    probs_MW = task.supervision.probs(slots.start, slots.stop).to(wide)
    slot_J = task.elements.target_N[part] - slots.start
    if task.label_N is None:
        return _Targets(probs_MW, slot_J, probs_MW.argmax(-1)[slot_J])
    return _Targets(probs_MW, slot_J, task.label_N[part])


def _score_text(
    task: TokenTask, logits_JW: Tensor, targets: _Targets, part: slice, coefficient_J: Tensor
) -> Scores:
    label_J, by_distance = targets.label_J, task.distance_weight > 0
    if kernel_runs(logits_JW, what="head loss"):
        from fledge.kernels.head_rows import fused_rows

        probs_MW, slot_J = (targets.slots_MW, targets.slot_J) if by_distance else (None, None)
        scores = fused_rows(
            logits_JW, probs_MW, slot_J, label_J, kind="hard", coefficient_J=coefficient_J.float(),
            text_weight=task.text_weight,
            distance_weight=task.distance_weight if by_distance else None,
        )  # fmt: skip
        return *scores, logits_JW
    wide_JW = logits_JW.to(_wide(logits_JW))
    probs_JW = targets.per_element() if by_distance else None
    correct_J = wide_JW.argmax(-1) == label_J
    loss_J, distance_J, dlogits_JW = text_rows(
        wide_JW, label_J, probs_JW, task.text_weight, task.distance_weight
    )
    dlogits_JW = dlogits_JW.mul_(coefficient_J[:, None].to(wide_JW.dtype)).to(logits_JW.dtype)
    return loss_J, correct_J, distance_J, dlogits_JW


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
