"""RMS norms, and products that keep only their inputs: neither norms nor cast weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.products import matmul


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm with statistics in fp32, whatever the dtype; x itself if `weight` is None."""
    if weight is None:
        return x
    if x.is_meta:
        kept: Tensor = _MetaNorm.apply(x, weight)  # type: ignore[no-untyped-call]
        return kept
    return F.rms_norm(x, weight.shape, weight, eps)


class _MetaNorm(torch.autograd.Function):
    """Keeps what the norm of a GPU keeps, for `fledge plan`; elsewhere torch keeps copies of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(map(torch.empty_like, ctx.saved_tensors))


class Renormed:
    """A norm that is recomputed in a backward pass, and its gradient."""

    def __init__(self, x_NE: Tensor, weight_E: Tensor, eps: float) -> None:
        with torch.enable_grad():
            self._x, self._weight = (x.detach().requires_grad_() for x in (x_NE, weight_E))
            self._out = rms_norm(self._x, self._weight, eps)
        self.out = self._out.detach()

    def back(self, dout_NE: Tensor) -> tuple[Tensor, ...]:
        """Gradients of x and of the weight."""
        return torch.autograd.grad(self._out, (self._x, self._weight), dout_NE)


# --- cast on use ---------------------------------------------------------------------------------
# Products with weights that are cast where they are used; the casts are not kept.
#
# A bf16 step with fp32 master weights would keep a bf16 copy of every weight between its forward
# and backward pass. These products keep only the masters, which exist anyway, and cast them
# again. The gradients are those of `F.linear(x, torch.cat([w.to(x.dtype) for w in masters]))`; on a
# GPU they are not rounded to the dtype of x.


def stacked(masters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Weights [O, I], concatenated along O and cast in a single pass over each."""
    if len(masters) == 1:
        return masters[0].to(dtype)
    rows = [len(weight) for weight in masters]
    out_OI = masters[0].new_empty((sum(rows), masters[0].shape[1]), dtype=dtype)
    for part, weight in zip(torch.split(out_OI, rows), masters, strict=True):
        part.copy_(weight)
    return out_OI


def weight_grad(dout_NO: Tensor, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] in the weight's precision. On a GPU, float32 sums are not rounded in between."""
    narrow = x_NI.dtype in (torch.bfloat16, torch.float16)
    if x_NI.is_cuda and narrow and dtype == torch.float32:
        return torch.mm(dout_NO.t(), x_NI, out_dtype=dtype)
    return matmul(dout_NO.t(), x_NI).to(dtype)


def master_grads(dout_NO: Tensor, x_NI: Tensor, masters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of each master."""
    dweight_OI = weight_grad(dout_NO, x_NI, masters[0].dtype)
    return torch.split(dweight_OI, [len(weight) for weight in masters])


class _LateLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: Tensor, norm_I: Tensor | None, eps: float, *masters: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_NI, norm_I, *masters)
        ctx.eps = eps
        return matmul(rms_norm(x_NI, norm_I, eps), stacked(masters, x_NI.dtype).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, norm_I, *masters = ctx.saved_tensors
        normed = None if norm_I is None else Renormed(x_NI, norm_I, ctx.eps)
        dinput: tuple[Tensor | None, ...] = (None, None)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            dread_NI = matmul(grads[0], stacked(masters, x_NI.dtype))
            dinput = (dread_NI, None) if normed is None else normed.back(dread_NI)
        read_NI = x_NI if normed is None else normed.out
        return *dinput, None, *master_grads(grads[0], read_NI, masters)


def late_linear(
    x_NI: Tensor, masters: Sequence[Tensor], norm_I: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """[N, O]: x, or norm(x), times the masters (concatenated if there are several), in the dtype of
    x. The norm is recomputed in the backward pass instead of kept."""
    out_NO: Tensor = _LateLinear.apply(x_NI, norm_I, eps, *masters)  # type: ignore[no-untyped-call]
    return out_NO
