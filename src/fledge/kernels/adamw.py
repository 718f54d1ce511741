# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""AdamW's update of large tensors, with one kernel launch for each.

The definition is torch.optim.AdamW. Torch's own kernel writes gradients back after dividing them by
a scale; this one reads parameter, gradient and moments once and writes all but the gradient.
Importing this file imports Triton.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of

_BLOCK = 1024  # elements per program


@triton.jit
def _update(
    param, grad, exp_avg, exp_avg_sq, factors, grad_scale, found_inf, count,
    beta1, rest1, beta2, rest2, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(found_inf) <= 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        live = i < count
        p = tl.load(param + i, mask=live, other=0.0).to(tl.float32)
        g = tl.load(grad + i, mask=live, other=0.0).to(tl.float32)
        m = tl.load(exp_avg + i, mask=live, other=0.0).to(tl.float32)
        v = tl.load(exp_avg_sq + i, mask=live, other=0.0).to(tl.float32)
        g *= tl.div_rn(1.0, tl.load(grad_scale))  # one division, not one per element
        p -= tl.load(factors + 2) * p
        m = beta1 * m + rest1 * g
        v = beta2 * v + rest2 * g * g
        size, widen = tl.load(factors), tl.load(factors + 1)
        p -= tl.div_rn(size * m, tl.sqrt_rn(v) * widen + eps)
        tl.store(param + i, p.to(param.dtype.element_ty), mask=live)
        tl.store(exp_avg + i, m.to(exp_avg.dtype.element_ty), mask=live)
        tl.store(exp_avg_sq + i, v.to(exp_avg_sq.dtype.element_ty), mask=live)


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    grad_scale: Tensor | None = None,  # gradients are divided by it
    found_inf: Tensor | None = None,  # 1: skip the update, and do not count the step
) -> None:
    """Update contiguous tensors on one device in place."""
    beta1, beta2 = betas
    torch._foreach_add_(list(steps), 1)
    factors_M3 = _factors(steps, lr, betas, weight_decay)
    scale = factors_M3.new_ones(()) if grad_scale is None else grad_scale
    skip = factors_M3.new_zeros(()) if found_inf is None else found_inf
    tensors = zip(params, grads, exp_avgs, exp_avg_sqs, factors_M3.unbind(), strict=True)
    for param, grad, exp_avg, exp_avg_sq, factors in tensors:
        count = param.numel()
        with on_device_of(param):
            _update[(triton.cdiv(count, _BLOCK),)](
                param, grad, exp_avg, exp_avg_sq, factors, scale, skip, count,
                beta1, 1 - beta1, beta2, 1 - beta2, eps, BLOCK=_BLOCK,
            )  # fmt: skip
    if found_inf is not None:
        torch._foreach_sub_(list(steps), [found_inf] * len(steps))


def _factors(
    steps: Sequence[Tensor], lr: float | Tensor, betas: tuple[float, float], weight_decay: float
) -> Tensor:
    """[M, 3] for each tensor: the factors of the first moment and of the root of the second, and
    the share of the parameter that decays. Computed on the device, because the learning rate may be
    there, and in float64, because 1 - beta^step loses most of its digits if beta is almost 1."""
    step_M = torch.stack(list(steps)).double()
    size_M, widen_M = lr / (1 - betas[0] ** step_M), (1 - betas[1] ** step_M).rsqrt()
    decay_M = torch.zeros_like(step_M) + lr * weight_decay
    return torch.stack([size_M, widen_M, decay_M], dim=1).float()
