# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The elementwise half of SwiGLU, one GPU kernel forward and one backward.

Same results as the torch lines of `layer._GatedMlp`, which read or write the widest activations of
a step nineteen times; these kernels do so nine times. Importing this file imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of


@triton.jit(do_not_specialize=["size"])
def _gate_forward(gate, up, gated, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    tl.store(gated + i, (g * tl.sigmoid(g) * u).to(gated.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["size"])
def _gate_backward(gate, up, dgated, gated, dgate, dup, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    d = tl.load(dgated + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    act = g * s
    kind = gated.dtype.element_ty
    tl.store(gated + i, (act * u).to(kind), mask=live)
    tl.store(dgate + i, (d * u * (s + act * (1 - s))).to(kind), mask=live)
    tl.store(dup + i, (d * act).to(kind), mask=live)


_GATE_BLOCK = 2048


def gate(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate_NI, up_NI = gate_NI.contiguous(), up_NI.contiguous()
    gated_NI = torch.empty_like(gate_NI)
    if size := gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_forward[(triton.cdiv(size, _GATE_BLOCK),)](
                gate_NI, up_NI, gated_NI, size, BLOCK=_GATE_BLOCK
            )
    return gated_NI


def gate_backward(
    gate_NI: Tensor, up_NI: Tensor, dgated_NI: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up once more, and the gradients of gate and up; dgated's memory is used up."""
    gate_NI, up_NI, dgated_NI = (x.contiguous() for x in (gate_NI, up_NI, dgated_NI))
    gated_NI, dgate_NI = torch.empty_like(gate_NI), torch.empty_like(gate_NI)
    if size := gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_backward[(triton.cdiv(size, _GATE_BLOCK),)](
                gate_NI, up_NI, dgated_NI, gated_NI, dgate_NI, dgated_NI, size, BLOCK=_GATE_BLOCK
            )
    return gated_NI, dgate_NI, dgated_NI
