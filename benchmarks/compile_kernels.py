"""Compiles the Triton kernels for GPUs that need not be here, and checks that they fit.

    python benchmarks/compile_kernels.py                    # all GPUs below, in bfloat16
    python benchmarks/compile_kernels.py --gpu l40s --dtype float32 --heads 128

Every kernel is launched by the code that training uses, on CPU tensors; instead of running, it is
compiled for the GPU in question. The table has a line per kernel, with the most that any of its
variants needs: shared memory, registers per thread, and bytes per thread that spill to memory.
The exit code is 1 if a kernel needs more shared memory than the GPU has.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # decided when Triton is imported

import torch
import triton
import triton.backends.nvidia
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fledge.kernels import adamw, elementwise, head_rows
from fledge.kernels import gate as tiles
from fledge.methods.block.attention import Sight, fused_blocks
from fledge.methods.block.plan import BlockRows
from fledge.rollout.attention_triton import fused_attention, fused_parallel
from fledge.rollout.plan import QueryRows

GPUS = {  # compute capability, and KiB of shared memory that one program may use
    "a100": (80, 163),
    "a10": (86, 99),  # and RTX 3090
    "l40s": (89, 99),  # and RTX 4090
    "h100": (90, 227),  # and H200
    "b200": (100, 227),
    "rtx5090": (120, 99),
}
ROWS, QUERY_HEADS, KEY_HEADS = 64, 8, 2


@dataclass(frozen=True)
class Needs:
    kernel: str
    channels: int
    shared: int  # bytes
    registers: int
    spilled: int  # bytes


class AbsentGPU:
    """Stands in for Triton's driver: says which GPU to compile for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are stored by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def compiled_by(calls: Iterator[None]) -> dict[str, list[Any]]:
    """The kernels, by name, that `calls` would have launched."""
    kernels: dict[tuple[str, str], Any] = {}
    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        kernels[self.__name__, kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    try:
        for _ in calls:
            pass
    finally:
        JITFunction.run = launch
    by_name: dict[str, list[Any]] = {}
    for (name, _), kernel in kernels.items():
        by_name.setdefault(name, []).append(kernel)
    return by_name


def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def backward(outputs: Tensor | tuple[Tensor, ...], leaves: list[Tensor]) -> None:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(outputs, leaves, [torch.zeros_like(out) for out in outputs])


def attention_calls(channels: int, dtype: torch.dtype) -> Iterator[None]:
    slot_N = torch.arange(ROWS)
    rows = QueryRows(slot_N, torch.zeros_like(slot_N), slot_N)
    q = leaf(ROWS, QUERY_HEADS, channels, dtype=dtype)
    k, v, *chain = (leaf(ROWS, KEY_HEADS, channels, dtype=dtype) for _ in range(4))
    backward(fused_attention(q, k, v, rows, []), [q, k, v])
    yield
    backward(fused_attention(q, k, v, rows, [(chain[0], chain[1])]), [q, k, v, *chain])
    yield
    depths = [ROWS // 2, ROWS // 2]
    starts = torch.tensor([0, ROWS // 2, ROWS])
    out = fused_parallel(q, (k, v), (chain[0], chain[1]), rows, depths, starts)
    backward(out, [q, k, v, *chain])
    yield
    for size, sight in ((8, Sight()), (16, Sight(causal=True, window=6))):
        blocks = BlockRows(slot_N[:8], torch.zeros_like(slot_N[:8]), size)
        block_q = leaf(8, size, QUERY_HEADS, channels, dtype=dtype)
        keys, values = (leaf(8, size, KEY_HEADS, channels, dtype=dtype) for _ in range(2))
        out = fused_blocks(block_q, (k, v), (keys, values), blocks, sight, None)
        backward(out, [block_q, k, v, keys, values])
        yield


def head_calls(channels: int, dtype: torch.dtype) -> Iterator[None]:
    angle = torch.zeros(ROWS, channels, dtype=dtype)
    x = leaf(ROWS, (QUERY_HEADS + 2 * KEY_HEADS) * channels, dtype=dtype)
    norms = [leaf(channels, dtype=dtype) for _ in range(2)]
    backward(elementwise.fused_heads(x, *norms, angle, angle, 1e-5, KEY_HEADS), [x, *norms])
    yield
    q = leaf(ROWS, QUERY_HEADS, channels, dtype=dtype)
    backward(elementwise.fused_rotate(q, angle, angle), [q])
    yield


def row_calls(dtype: torch.dtype, width: int = 32_000) -> Iterator[None]:
    """What does not depend on the head dim: SwiGLU, losses, AdamW."""
    gate, up, grad = (torch.zeros(ROWS, 1024, dtype=dtype) for _ in range(3))
    elementwise.gate(gate, up)
    elementwise.gate_backward(gate, up, grad)
    yield
    logits, probs = torch.zeros(8, width, dtype=dtype), torch.zeros(8, width)
    index, weight = torch.arange(8), torch.zeros(8)
    for kind in ("soft", "hard", "kl", "alpha", "lambda", "acceptance"):
        written = {} if kind == "acceptance" else {"coefficient_J": weight}
        head_rows.fused_rows(logits, probs, index, index, kind=kind, ce_weight_J=weight, **written)
        yield
    text = {"kind": "hard", "coefficient_J": weight, "text_weight": 0.1}
    head_rows.fused_rows(logits, probs, index, index, **text, distance_weight=0.9)
    head_rows.fused_rows(logits, None, None, index, **text)
    yield
    param, grad = torch.zeros(4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    moments, step = [torch.zeros(4096), torch.zeros(4096)], torch.zeros(())
    update = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
    adamw.adamw([param], [grad], [moments[0]], [moments[1]], [step], **update)
    yield


def needs(kernel: Any) -> tuple[int, int, int]:
    """Shared memory in bytes, registers per thread, spilled bytes per thread."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    assert usage is not None, printed
    return kernel.metadata.shared, int(usage[1]), int(usage[2])


def survey(gpu: str, dtype: torch.dtype, channels: list[int]) -> Iterator[Needs]:
    capability, shared_kib = GPUS[gpu]
    driver.set_active(AbsentGPU(capability))
    tiles.shared_memory = lambda device: shared_kib << 10
    runs = [(0, row_calls(dtype))]
    for count in channels:
        runs += [(count, attention_calls(count, dtype)), (count, head_calls(count, dtype))]
    for count, calls in runs:
        for name, variants in compiled_by(calls).items():
            yield Needs(name, count, *map(max, zip(*map(needs, variants), strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="append", choices=GPUS, help="default: all")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--heads", type=int, action="append", help="head dims; default: all four")
    args = parser.parse_args()
    too_large = 0
    for gpu in args.gpu or GPUS:
        limit = GPUS[gpu][1] << 10
        table = Table("kernel", "head dim", "shared memory", "registers", "spilled")
        table.title = f"{gpu}: {limit >> 10} KiB of shared memory, {args.dtype}"
        for found in survey(gpu, getattr(torch, args.dtype), args.heads or [64, 96, 128, 256]):
            over = found.shared > limit
            too_large += over
            table.add_row(
                found.kernel,
                str(found.channels or ""),
                f"{found.shared:,}" + (" does not fit" if over else ""),
                str(found.registers),
                str(found.spilled or ""),
                style="red" if over else None,
            )
        Console().print(table)
    sys.exit(1 if too_large else 0)


if __name__ == "__main__":
    main()
