# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The elementwise part of SwiGLU: one GPU kernel for the forward pass, one for the backward pass.

Same results as the torch code of `mlp._GatedMlp`, which reads or writes the widest activations of
a step nineteen times; these kernels do so nine times. Importing this file imports Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fledge.kernels.gate import on_device_of


@triton.jit
def _piece_of_row(WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of a program's elements, and which of them exist. The width is a compile-time
    constant: only then can the compiler prove that adjacent lanes are live together, and vectorize
    their loads."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64) * WIDTH + column, column < WIDTH


@triton.jit
def _gate_forward(gate, up, gated, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, live = _piece_of_row(WIDTH, BLOCK)
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    tl.store(gated + i, (g * tl.sigmoid(g) * u).to(gated.dtype.element_ty), mask=live)


@triton.jit
def _gate_backward(gate, up, dgated, gated, dgate, dup, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    i, live = _piece_of_row(WIDTH, BLOCK)
    g = tl.load(gate + i, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + i, mask=live, other=0.0).to(tl.float32)
    d = tl.load(dgated + i, mask=live, other=0.0).to(tl.float32)
    s = tl.sigmoid(g)
    act = g * s
    kind = gated.dtype.element_ty
    tl.store(gated + i, (act * u).to(kind), mask=live)
    tl.store(dgate + i, (d * u * (s + act * (1 - s))).to(kind), mask=live)
    tl.store(dup + i, (d * act).to(kind), mask=live)


def _block(width: int) -> int:
    """The block size: the largest of these that divides a row, if any does."""
    for size in (2048, 1024, 512):
        if width % size == 0:
            return size
    return min(1024, int(triton.next_power_of_2(width)))


def gate(gate_NI: Tensor, up_NI: Tensor) -> Tensor:
    """silu(gate) * up."""
    gate_NI, up_NI = gate_NI.contiguous(), up_NI.contiguous()
    gated_NI = torch.empty_like(gate_NI)
    rows, width = gate_NI.shape
    if gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_forward[(rows, triton.cdiv(width, _block(width)))](
                gate_NI, up_NI, gated_NI, WIDTH=width, BLOCK=_block(width)
            )
    return gated_NI


def gate_backward(
    gate_NI: Tensor, up_NI: Tensor, dgated_NI: Tensor, *, use_up: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """silu(gate) * up, recomputed, and the gradients of gate and up. dgated is overwritten, and
    with `use_up` gate and up as well: they are the widest tensors of a step."""
    gate_NI, up_NI, dgated_NI = (x.contiguous() for x in (gate_NI, up_NI, dgated_NI))
    gated_NI, dgate_NI = (
        (gate_NI, up_NI) if use_up else (torch.empty_like(gate_NI), torch.empty_like(gate_NI))
    )
    rows, width = gate_NI.shape
    if gate_NI.numel():
        with on_device_of(gate_NI):
            _gate_backward[(rows, triton.cdiv(width, _block(width)))](
                gate_NI, up_NI, dgated_NI, gated_NI, dgate_NI, dgated_NI,
                WIDTH=width, BLOCK=_block(width),
            )  # fmt: skip
    return gated_NI, dgate_NI, dgated_NI
