"""Draft head, loss, metrics and gradients, in chunks: no [elements, W] tensor outlives its chunk.

Gradients are hand-written and computed in the forward pass, while a chunk's logits exist; the
backward pass only scales what was saved: [elements, E] for the states and [W, E] for the head.
The loss itself is defined by a `losses.base.Loss`.

Elements are sorted by the slot that holds their target (`rollout.plan.HeadElements`), so a chunk
needs a short range of target slots and derives each slot's distribution once for all depths.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gate import kernel_runs
from fledge.methods.losses.base import Loss, acceptance
from fledge.methods.shared.supervision import CHUNK_SCORES, Supervision
from fledge.rollout.plan import HeadElements


@dataclass(frozen=True)
class HeadLoss:
    loss: Tensor  # sum over elements of coefficient * row loss, differentiable
    row_loss_N: Tensor  # per element, before the coefficient; elements as in `HeadElements`
    correct_N: Tensor  # bool: the draft's top token is the target's top token


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


def head_loss(
    hidden_PE: Tensor,
    head_WE: Tensor,
    task: HeadTask,
    *,
    coefficient_N: Tensor,  # weight of each row's loss, where it is charged
    acceptance_L: Tensor | None = None,
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
    coefficient_N = torch.where(task.charged_N, coefficient_N, 0.0)
    return HeadLoss(
        *_HeadLoss.apply(  # type: ignore[no-untyped-call]
            hidden_PE, head_WE, task, coefficient_N, weight_N, torch.is_grad_enabled()
        )
    )


@torch.no_grad()
def head_acceptance(hidden_PE: Tensor, head_WE: Tensor, task: HeadTask) -> Tensor:
    """[2, L] float64: for each loss, the summed acceptance of its charged elements and their count.

    This is a separate pass over the logits. It costs a third of the head's work; keeping the
    gradients of both terms of a weighted loss apart would cost two thirds.
    """
    head = head_WE.to(hidden_PE.dtype)
    alpha_N = hidden_PE.new_zeros(len(task.elements), dtype=torch.float64)
    for part, element_J, target in _chunks(task, hidden_PE, head):
        logits_JW = F.linear(hidden_PE.index_select(0, element_J), head)
        alpha_N[part] = _alpha(logits_JW, target).double()
    values_2N = torch.stack([alpha_N, torch.ones_like(alpha_N)]) * task.charged_N
    return values_2N.new_zeros(2, task.num_losses).index_add_(1, task.which_loss(), values_2N)


def mean_acceptance(sums_2L: Tensor) -> Tensor:
    """[L] means from the sums of `head_acceptance`; 0 for a loss without elements."""
    return sums_2L[0] / sums_2L[1].clamp_min(1)


def _wide(hidden_PE: Tensor) -> torch.dtype:
    """The dtype in which losses are computed: at least fp32."""
    return torch.promote_types(hidden_PE.dtype, torch.float32)


def _chunk_rows(hidden_PE: Tensor, width: int, loss: Loss) -> int:
    """As many rows as fit the memory of a chunk: more with the kernel, which makes no fp32 copies
    of the logits."""
    fused = loss.kernel is not None and kernel_runs(hidden_PE, what="head loss")
    copies_avoided = 4 if fused else 1
    return max(1, copies_avoided * CHUNK_SCORES // width)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PE: Tensor,
        head_WE: Tensor,
        task: HeadTask,
        coefficient_N: Tensor,
        weight_N: Tensor | None,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, head = _wide(hidden_PE), head_WE.to(hidden_PE.dtype)
        want_hidden, want_head = (with_grad and need for need in ctx.needs_input_grad[:2])
        dhidden_PE = torch.zeros_like(hidden_PE) if want_hidden else None
        dhead_WE = torch.zeros_like(head_WE, dtype=wide) if want_head else None
        row_loss_N = hidden_PE.new_zeros(len(task.elements), dtype=wide)
        correct_N = torch.zeros_like(row_loss_N, dtype=torch.bool)
        for part, element_J, target in _chunks(task, hidden_PE, head):
            x_JE = hidden_PE.index_select(0, element_J)
            logits_JW = F.linear(x_JE, head)
            weight_J = None if weight_N is None else weight_N[part]
            row_loss_N[part], correct_N[part], dlogits_JW = _score(
                logits_JW, target, task.loss, coefficient_N[part], weight_J
            )
            if dhidden_PE is not None:
                dhidden_PE.index_copy_(0, element_J, dlogits_JW @ head)
            if dhead_WE is not None:
                _add_product(dhead_WE, dlogits_JW, x_JE)
        correct_N &= row_loss_N.isfinite()  # the argmaxes of two NaN rows agree
        loss = (row_loss_N * coefficient_N).sum()
        ctx.save_for_backward(dhidden_PE, None if dhead_WE is None else dhead_WE.to(head_WE.dtype))
        ctx.mark_non_differentiable(row_loss_N, correct_N)
        return loss, row_loss_N, correct_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # scale in place, without a second copy of the head's gradient, unless the graph is retained
        multiply = (
            torch.mul if torch._C._autograd._get_current_graph_task_keep_graph() else Tensor.mul_
        )
        dhidden_PE, dhead_WE = (
            None if grad is None else multiply(grad, grads[0].to(grad.dtype))
            for grad in ctx.saved_tensors
        )
        return dhidden_PE, dhead_WE, None, None, None, None


def _add_product(into_WE: Tensor, dlogits_JW: Tensor, x_JE: Tensor) -> None:
    """into += dlogits.T @ x. On a GPU the product itself accumulates in the fp32 of `into`."""
    if into_WE.is_cuda and into_WE.dtype == torch.float32 != x_JE.dtype:
        left_WJ = dlogits_JW.t()
        torch.addmm(into_WE, left_WJ, x_JE, out_dtype=torch.float32, out=into_WE)
    else:
        into_WE += dlogits_JW.t() @ x_JE


@dataclass(frozen=True)
class _Targets:
    """What the elements of a chunk are scored against; slots are shared between depths."""

    slots_MW: Tensor  # the target's probabilities
    slot_J: Tensor  # each element's row of `slots_MW`
    top_J: Tensor  # the target's top token

    def per_element(self) -> Tensor:
        """The target's probabilities [J, W], one row per element."""
        return self.slots_MW.index_select(0, self.slot_J)


def _chunks(
    task: HeadTask, hidden_PE: Tensor, head: Tensor
) -> Iterator[tuple[slice, Tensor, _Targets]]:
    """For each chunk: its slice of the elements, their rows among the states, their targets."""
    elements = task.elements
    rows = task.chunk_rows or _chunk_rows(hidden_PE, len(head), task.loss)
    for part, slots in elements.chunks(rows):
        slots_MW = task.supervision.probs(slots.start, slots.stop).to(_wide(hidden_PE))
        slot_J = elements.target_N[part] - slots.start
        top_J = slots_MW.argmax(-1)[slot_J]
        yield part, elements.element_N[part], _Targets(slots_MW, slot_J, top_J)


def _alpha(logits_JW: Tensor, target: _Targets) -> Tensor:
    """The probability [J] that speculative sampling accepts the draft's token."""
    if kernel_runs(logits_JW, what="head loss"):
        from fledge.kernels.head_rows import fused_rows

        slots = (target.slots_MW, target.slot_J, target.top_J)
        return fused_rows(logits_JW, *slots, kind="acceptance")[0]
    return acceptance(logits_JW.to(target.slots_MW.dtype), target.per_element())


def _score(
    logits_JW: Tensor, target: _Targets, loss: Loss, coefficient_J: Tensor, weight_J: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Row losses [J], hits [J], and coefficient * gradient [J, W]; the logits are overwritten."""
    if loss.kernel is not None and kernel_runs(logits_JW, what="head loss"):
        from fledge.kernels.head_rows import fused_rows

        loss_J, correct_J = fused_rows(
            logits_JW, target.slots_MW, target.slot_J, target.top_J, kind=loss.kernel,
            coefficient_J=coefficient_J, ce_weight_J=weight_J,
        )  # fmt: skip
        return loss_J, correct_J, logits_JW
    wide_JW = logits_JW.to(target.slots_MW.dtype)
    correct_J = wide_JW.argmax(-1) == target.top_J
    loss_J, dlogits_JW = loss.rows(wide_JW, target.per_element(), weight_J)
    return loss_J, correct_J, dlogits_JW.mul_(coefficient_J[:, None]).to(logits_JW.dtype)
