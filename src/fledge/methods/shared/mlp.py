"""The MLP of a draft's layers: SwiGLU, and how much of it is kept for the backward pass."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gate import kernel_runs
from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.norms import Renormed, rms_norm

Norm = tuple[Tensor, float]  # weight [E] and eps


class _GatedMlp(torch.autograd.Function):
    """down(silu(gate(x)) * up(x)), keeping only the two products: half of what autograd would keep.

    They are the widest activations of a step, and there is one pair per depth. With `recompute` not
    even they are kept, and the backward pass computes them again. With a norm, x is normed first,
    and the backward pass recomputes the norm as well. Weights wider than x are cast where they are
    used, each time: that costs less than keeping the cast weights between the passes.

    With `once` there is only one backward pass. It reuses the memory of kept tensors for gradients
    and frees each as soon as possible: this is when a step has the least memory to spare.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NE: Tensor,
        norm_E: Tensor | None,
        gate_IE: Tensor,
        up_IE: Tensor,
        down_EI: Tensor,
        eps: float,
        recompute: bool,
        once: bool,
    ) -> Tensor:
        ctx.eps, ctx.recompute, dtype = eps, recompute, x_NE.dtype
        read_NE = rms_norm(x_NE, norm_E, eps)
        gate_NI, up_NI = F.linear(read_NE, gate_IE.to(dtype)), F.linear(read_NE, up_IE.to(dtype))
        kept = () if recompute else (gate_NI, up_NI)
        # torch holds saved tensors until the backward pass ends; these can be freed during it
        ctx.kept = list(kept) if once else None
        ctx.save_for_backward(x_NE, norm_E, gate_IE, up_IE, down_EI, *(() if once else kept))
        if kernel_runs(gate_NI, what="SwiGLU"):
            from fledge.kernels.elementwise import gate

            return F.linear(gate(gate_NI, up_NI), down_EI.to(dtype))
        return F.linear(F.silu(gate_NI) * up_NI, down_EI.to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dout_NE,) = grads
        x_NE, norm_E, gate_IE, up_IE, down_EI, *kept = ctx.saved_tensors
        once = ctx.kept is not None
        if once:
            kept, ctx.kept = ctx.kept, []
            if not kept and not ctx.recompute:
                raise RuntimeError("backward: a second pass is not possible with once=True")
        normed = None if norm_E is None else Renormed(x_NE, norm_E, ctx.eps)
        read_NE, dtype = x_NE if normed is None else normed.out, x_NE.dtype
        gate_NI, up_NI = kept or (F.linear(read_NE, w.to(dtype)) for w in (gate_IE, up_IE))
        dgated_NI = dout_NE @ down_EI.to(dtype)
        gated_NI, dgate_NI, dup_NI = _gate_backward(
            gate_NI, up_NI, dgated_NI, use_up=once or not kept
        )
        del gate_NI, up_NI, kept, dgated_NI
        ddown_EI = _weight_grad(dout_NE, gated_NI, down_EI.dtype)
        del gated_NI  # free it for what follows: it is as wide as the others
        dgate_IE = _weight_grad(dgate_NI, read_NE, gate_IE.dtype)
        dup_IE = _weight_grad(dup_NI, read_NE, up_IE.dtype)
        dx_NE = torch.addmm(dgate_NI @ gate_IE.to(dtype), dup_NI, up_IE.to(dtype))
        del dgate_NI, dup_NI
        dinput = (dx_NE, None) if normed is None else normed.back(dx_NE)
        return *dinput, dgate_IE, dup_IE, ddown_EI, None, None, None


def _weight_grad(dout_NO: Tensor, x_NI: Tensor, dtype: torch.dtype) -> Tensor:
    """[O, I] in the weight's precision. On a GPU, float32 sums are not rounded in between."""
    narrow = x_NI.dtype in (torch.bfloat16, torch.float16)
    if x_NI.is_cuda and narrow and dtype == torch.float32:
        return torch.mm(dout_NO.t(), x_NI, out_dtype=dtype)
    return (dout_NO.t() @ x_NI).to(dtype)


def _gate_backward(
    gate_NI: Tensor, up_NI: Tensor, dgated_NI: Tensor, *, use_up: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of gate and up. dgated is overwritten; with
    `use_up`, on a GPU, so are gate and up."""
    if kernel_runs(gate_NI, what="SwiGLU"):
        from fledge.kernels.elementwise import gate_backward

        return gate_backward(gate_NI, up_NI, dgated_NI, use_up=use_up)
    act_NI = F.silu(gate_NI)
    gated_NI = act_NI * up_NI
    dup_NI = act_NI.mul_(dgated_NI)
    dgate_NI = torch.ops.aten.silu_backward(dgated_NI.mul_(up_NI), gate_NI)
    return gated_NI, dgate_NI, dup_NI


def gated_mlp(
    x_NE: Tensor,
    gate_IE: Tensor,
    up_IE: Tensor,
    down_EI: Tensor,
    *,
    norm: Norm | None = None,
    recompute: bool = False,
    once: bool = False,
) -> Tensor:
    """SwiGLU of x, or of norm(x). `once`: there will be at most one backward pass."""
    kind = x_NE.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # cast here, because the hand-written backward pass runs outside of autocast
        dtype = torch.get_autocast_dtype(kind)
        x_NE, gate_IE, up_IE, down_EI = (x.to(dtype) for x in (x_NE, gate_IE, up_IE, down_EI))
    norm_E, eps = norm or (None, 0.0)
    out_NE: Tensor = _GatedMlp.apply(  # type: ignore[no-untyped-call]
        x_NE, norm_E, gate_IE, up_IE, down_EI, eps, recompute, once
    )
    return out_NE


def forget_mlp(config: DraftConfig, rows: int, dtype: torch.dtype, *, kept_gib: float) -> bool:
    """Whether MLPs over `rows` rows (of all layers) would keep more than `kept_gib` for the
    backward pass and should be recomputed instead: that costs a twentieth of a step's time and
    saves a third of its memory."""
    return _mlp_bytes(config, rows, dtype) > kept_gib * 2**30


def kept_mlps(
    config: DraftConfig, rows: int, dtype: torch.dtype, *, layers: int, kept_gib: float
) -> int:
    """The number of layers whose MLPs, over `rows` rows each, together keep at most `kept_gib`.
    These should be the last layers: the backward pass frees their memory before gradients fill it.
    """
    per_layer = _mlp_bytes(config, rows, dtype)
    return layers if per_layer == 0 else min(layers, int(kept_gib * 2**30 // per_layer))


def _mlp_bytes(config: DraftConfig, rows: int, dtype: torch.dtype) -> int:
    return rows * 2 * config.intermediate_size * dtype.itemsize
