"""Speed and error of rollout attention on a GPU: the kernel, the torch block loop, and SDPA.

    python benchmarks/bench_attention.py            # the three shapes, under 40 s on an H200
    python benchmarks/bench_attention.py --sweep    # which tile is fastest, per kernel and shape

One line per shape: milliseconds of all 7 depths, forward / backward, 60 % of the slots supervised
(the end of every document). `blocked` is the torch path; for long documents it is timed at one
depth and scaled. `sdpa` is PyTorch's causal attention over every slot of equal documents, 7 times,
without chains: the cost without compaction. TFLOP/s counts visible scores only. Errors are relative
to fp64 (norm over a subset of rows and over the gradients that they send to the keys), as multiples
of the error that the dense reference makes from the same bf16 inputs: 1 is perfect.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from fledge.kernels.gate import TILES, Tile
from fledge.rollout import attention_triton as triton_attention
from fledge.rollout.attention import blocked_attention, reference_attention
from fledge.rollout.attention_triton import fused_attention
from fledge.rollout.plan import QueryRows, RolloutPlan, plan_rollout
from fledge.rollout.slots import RowMasks

DEPTHS = 7
SUPERVISED = 0.6


@dataclass(frozen=True)
class Shape:
    name: str
    lengths: list[int]
    heads: int
    groups: int
    channels: int
    blocked_depths: int  # how many depths of the torch path to time

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1


def documents(total: int, mean: int) -> list[int]:
    rng = np.random.default_rng(0)
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths.append(int(np.clip(mean * rng.lognormal(0, 0.5) / np.exp(0.125), 8, 4 * mean)))
    lengths[-1] -= sum(lengths) - total
    return [n for n in lengths if n > 0]


SHAPES = [
    Shape("135m 16384 packed", documents(16_384, 250), 9, 3, 64, DEPTHS),
    Shape("8b 4 x 2048", [2048] * 4, 32, 8, 128, DEPTHS),
    Shape("8b 1 x 32768", [32_768], 32, 8, 128, 1),
]


def plan_of(shape: Shape) -> RolloutPlan:
    loss = [(torch.arange(n) >= round(n * (1 - SUPERVISED))).long() for n in shape.lengths]
    loss_BT = torch.cat(loss)[None]
    masks = RowMasks(
        loss_BT,
        torch.ones_like(loss_BT),
        position_ids=torch.cat([torch.arange(n) for n in shape.lengths])[None],
        seq_lens=torch.tensor([shape.lengths]),
        doc_remaining=torch.cat([torch.arange(n - 1, -1, -1) for n in shape.lengths])[None],
    )
    return plan_rollout(masks, num_depths=DEPTHS, device=torch.device("cuda"))


def inputs_of(shape: Shape, plan: RolloutPlan, depth: int) -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(depth)

    def random(rows: int, heads: int) -> Tensor:
        x = torch.randn(rows, heads, shape.channels, generator=g, device="cuda")
        return x.bfloat16().requires_grad_()

    keys = [random(len(plan.slot_T), shape.groups) for _ in range(2)]
    chain = [random(plan.counts[k], shape.groups) for k in range(1, depth + 1) for _ in range(2)]
    return [random(plan.counts[depth], shape.heads), *keys, *chain]


def timed(function: Callable[[], object], repeats: int) -> float:
    """Median milliseconds, after one warm-up call."""
    function()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def attend(function: Callable[..., Tensor], rows: QueryRows, inputs: list[Tensor]) -> Tensor:
    q, k, v, *chain = inputs
    if function is not fused_attention:
        chain = [x[: len(rows)] for x in chain]
    return function(q, k, v, rows, list(zip(chain[::2], chain[1::2], strict=True)))


def time_path(
    function: Callable[..., Tensor], shape: Shape, plan: RolloutPlan, depths: int, repeats: int
) -> tuple[float, float]:
    """Milliseconds of (forward, backward) summed over depths and scaled to all of them."""
    forward = backward = 0.0
    for depth in range(depths):
        rows, inputs = plan.depths[depth], inputs_of(shape, plan, depth)
        out = attend(function, rows, inputs)
        dout = torch.randn_like(out)
        with torch.no_grad():
            forward += timed(lambda r=rows, i=inputs: attend(function, r, i), repeats)
        backward += timed(
            lambda o=out, i=inputs, d=dout: torch.autograd.grad(o, i, d, retain_graph=True), repeats
        )
    return forward * DEPTHS / depths, backward * DEPTHS / depths


def time_sdpa(shape: Shape) -> tuple[float, float]:
    """Milliseconds of causal attention over equal documents, every slot a query, for all depths."""
    size = (len(shape.lengths), shape.heads, shape.lengths[0], shape.channels)
    q = torch.randn(size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn_like(q[:, : shape.groups]).detach().requires_grad_() for _ in range(2)
    )  # fmt: skip
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dout = torch.randn_like(out)
    with torch.no_grad():
        forward = timed(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 5
        )
    backward = timed(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), 5)
    return forward * DEPTHS, backward * DEPTHS


def error_ratios(shape: Shape, plan: RolloutPlan, depth: int = 3, subset: int = 48) -> list[float]:
    """Errors of the kernel relative to the reference: output, dq, dk, dv, then the chain's."""
    rows, inputs = plan.depths[depth], inputs_of(shape, plan, depth)
    picked = torch.randperm(len(rows), device="cuda")[:subset]
    slot_N = rows.slot_N[picked]
    subset_rows = QueryRows(slot_N, rows.first_N[picked], torch.argsort(slot_N))
    dout = torch.randn(subset, shape.heads, shape.channels, device="cuda").bfloat16()

    out = attend(fused_attention, rows, inputs)
    full_dout = torch.zeros_like(out).index_copy_(0, picked, dout)
    grads = torch.autograd.grad(out, inputs, full_dout)
    fused = [out[picked], grads[0][picked], *grads[1:3], *(x[picked] for x in grads[3:])]

    def reference(dtype: torch.dtype) -> list[Tensor]:
        by_row = [0, *range(3, len(inputs))]
        tensors = [x.detach()[picked] if i in by_row else x.detach() for i, x in enumerate(inputs)]
        tensors = [x.to(dtype).requires_grad_() for x in tensors]
        result = attend(reference_attention, subset_rows, tensors)
        return [result, *torch.autograd.grad(result, tensors, dout.to(dtype))]

    exact, bf16 = reference(torch.float64), reference(torch.bfloat16)
    return [
        float(((a - t).norm() / (b - t).norm()).detach())
        for a, b, t in zip(fused, bf16, exact, strict=True)
    ]


def visible_scores(plan: RolloutPlan) -> int:
    return sum(int((r.slot_N - r.first_N + 1).sum()) for r in plan.depths)


def report(shape: Shape) -> None:
    plan = plan_of(shape)
    fused = time_path(fused_attention, shape, plan, DEPTHS, 5)
    blocked = time_path(blocked_attention, shape, plan, shape.blocked_depths, 1)
    sdpa = time_sdpa(shape) if shape.equal else None
    flops = 4 * visible_scores(plan) * shape.heads * shape.channels
    rates = flops / fused[0] / 1e9, 2.5 * flops / fused[1] / 1e9
    errors = error_ratios(shape, plan)
    print(
        f"{shape.name:18} {sum(plan.counts):7} "
        f"{fused[0]:7.2f} / {fused[1]:6.2f} {rates[0]:5.0f} / {rates[1]:3.0f} "
        f"{blocked[0]:8.1f} / {blocked[1]:7.1f} "
        + (f"{sdpa[0]:7.2f} / {sdpa[1]:6.2f}" if sdpa else f"{'-':>16}")
        + "  " + " ".join(f"{e:.2f}" for e in errors[:4]) + f" (chain {max(errors[4:]):.2f})",
        flush=True,
    )  # fmt: skip


CANDIDATES = {
    "attend": [
        Tile(m, n, w, s) for m in (64, 128) for n in (32, 64, 128) for w in (4, 8) for s in (2, 3)
    ],
    "query_grad": [
        Tile(m, n, w, s) for m in (64, 128) for n in (32, 64) for w in (4, 8) for s in (2, 3)
    ],
    "key_grad": [
        Tile(m, n, w, s) for m in (32, 64) for n in (64, 128) for w in (4, 8) for s in (1, 2, 3)
    ],
}


def sweep(shape: Shape, depth: int = 3) -> None:
    """Time every candidate tile of every kernel at one depth; prints the five fastest."""
    plan = plan_of(shape)
    q, k, v, *chain = (x.detach() for x in inputs_of(shape, plan, depth))
    chains = triton_attention.Chain.of([*chain[::2], *chain[1::2]])
    job = triton_attention.Job(q, k, v, plan.depths[depth], chains)
    out, lse = job.attend()
    dout = torch.randn_like(out)
    _, delta = job.query_grad(out, dout, lse)
    calls = {
        "attend": lambda: job.attend(),
        "query_grad": lambda: job.query_grad(out, dout, lse),
        "key_grad": lambda: job.key_grad(dout, lse, delta),
    }
    for kernel, call in calls.items():
        timings = []
        for tile in CANDIDATES[kernel]:
            for width in TILES[kernel]:
                TILES[kernel][width] = tile
            try:
                timings.append((timed(call, 5), tile))
            except triton.errors.TritonError as error:
                print(f"  {kernel} {tile}: {str(error).splitlines()[0]}")
        print(f"{shape.name} {kernel}")
        for ms, tile in sorted(timings, key=lambda pair: pair[0])[:5]:
            print(f"  {ms:7.3f} ms  {tile}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if args.only in shape.name]
    if args.sweep:
        for shape in shapes:
            sweep(shape)
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'shape':18} {'rows':>7} {'kernel ms':>16} {'TFLOP/s':>11} {'blocked ms':>18} "
          f"{'sdpa ms':>16}  error: out dq dk dv")  # fmt: skip
    for shape in shapes:
        report(shape)


if __name__ == "__main__":
    main()
