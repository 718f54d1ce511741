"""The cost of capture: `generate_batch` in hidden encoding against the plain base-model forward.

    python benchmarks/bench_capture.py [--model smollm2-135m] [--device cpu] [--rows 2 --width 256]

Writes benchmarks/results/capture.md. Times are paired (plain and capture, alternating which goes
first), so that a busy machine slows both; the overhead is the median of the pairs' ratios. Memory
is the peak of live tensor bytes during the call, counted at every operation, above what was alive
before.
"""

import argparse
import platform
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fledge.models.resolve import local_model
from fledge.target.hf.model import HFEagle3TargetModel
from fledge.target.packing import plan_groups

RESULTS = Path(__file__).parent / "results" / "capture.md"


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, torch.Tensor)]
        self._known.update(tensor.untyped_storage() for tensor in inputs)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, size)

    def _release(self, size: int) -> None:
        self.live -= size


def peak_bytes(call: Callable[[], object]) -> int:
    with PeakBytes() as counter:
        result = call()
    del result
    return counter.peak


def seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Pair:
    """Seconds of two calls, timed alternately."""

    first_s: list[float]
    second_s: list[float]

    @property
    def ratio(self) -> float:
        return median(b / a for a, b in zip(self.first_s, self.second_s, strict=True))


def timed(first: Callable[[], object], second: Callable[[], object], repeats: int) -> Pair:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    first(), second()
    pair = Pair([], [])
    for repeat in range(repeats):
        turn = [(first, pair.first_s), (second, pair.second_s)]
        for call, times in turn if repeat % 2 else reversed(turn):  # alternate which goes first
            times.append(seconds(call, device))
    return pair


def packed_row(width: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """One row of chat-like documents (log-normal lengths, 40 .. 640 tokens) that fills `width`."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < width:
        drawn = torch.exp(torch.randn((), generator=generator) * 0.6 + 5.3)
        lengths.append(min(int(drawn.clamp(40, 640)), width - sum(lengths)))
    ids = torch.randint(0, 1000, (1, width), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    remaining = torch.cat([torch.arange(n).flip(0) for n in lengths])[None]
    return (
        ids,
        torch.ones_like(ids),
        torch.ones_like(ids),
        positions,
        torch.tensor([lengths]),
        remaining,
    )


def dense_forward(model: Any, ids: torch.Tensor, positions: torch.Tensor) -> Any:
    """The same packed row with a dense block-causal mask, for comparison."""
    document = (positions == 0).cumsum(-1)
    visible = (document[:, :, None] == document[:, None, :]).tril()
    with torch.no_grad():
        return model.base_model(
            input_ids=ids, attention_mask=visible[:, None], position_ids=positions, use_cache=False
        )


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cpu = [
            line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
        ]
        name = f"{cpu[0].split(': ')[1] if cpu else platform.machine()}, {len(cpu)} cores"
    threads = torch.get_num_threads()
    return f"{name}; torch {torch.__version__}, {threads} thread(s)"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def padded_rows_table(target: HFEagle3TargetModel, asked: argparse.Namespace) -> list[str]:
    """Plain forward against capture, on full rows."""
    model: Any = target.model
    ids = torch.randint(0, 1000, (asked.rows, asked.width), device=asked.device)
    ones = torch.ones_like(ids)

    @torch.no_grad()
    def plain() -> Any:
        return model.base_model(input_ids=ids, attention_mask=ones, use_cache=False)

    def capture() -> Any:
        return target.generate_batch(ids, ones, ones)

    pair = timed(plain, capture, asked.repeats)
    returned = capture().nbytes - ones.nbytes  # the attention mask belongs to the caller
    plain_peak, capture_peak = peak_bytes(plain), peak_bytes(capture)
    mib = 2**20
    return [
        f"Rows {asked.rows} x {asked.width}, {asked.repeats} pairs in turn:",
        "",
        "| | plain base-model forward | generate_batch, hidden |",
        "|---|--:|--:|",
        f"| median ms | {1e3 * median(pair.first_s):.1f} | {1e3 * median(pair.second_s):.1f} |",
        f"| fastest ms | {1e3 * min(pair.first_s):.1f} | {1e3 * min(pair.second_s):.1f} |",
        f"| peak live MiB | {plain_peak / mib:.2f} | {capture_peak / mib:.2f} |",
        "",
        f"**Overhead: {pair.ratio - 1:+.2%}** (median of the pairs' ratios; fastest against "
        f"fastest {min(pair.second_s) / min(pair.first_s) - 1:+.2%}).",
        f"**Extra peak memory: {(capture_peak - plain_peak) / mib:.2f} MiB; tensors returned: "
        f"{returned / mib:.2f} MiB.**",
    ]


def packed_row_table(target: HFEagle3TargetModel, asked: argparse.Namespace) -> list[str]:
    """A dense mask against documents as rows, on one packed row."""
    row = packed_row(asked.packed_width)
    ids, positions = row[0].to(asked.device), row[3].to(asked.device)

    def dense() -> Any:
        return dense_forward(target.model, ids, positions)

    def as_rows() -> Any:
        target.try_one_row = False
        return target.generate_batch(*row)

    rows = timed(dense, as_rows, max(3, asked.repeats // 3))
    width, lengths = asked.packed_width, row[4][0].tolist()
    groups = plan_groups(lengths, overhead_tokens=target.overhead_tokens, max_tokens=width)
    cells = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    return [
        f"One packed row of {width} tokens, {len(lengths)} documents "
        f"({min(lengths)} .. {max(lengths)} tokens):",
        "",
        "| | dense block-causal mask | documents as rows |",
        "|---|--:|--:|",
        f"| fastest ms | {1e3 * min(rows.first_s):.0f} | {1e3 * min(rows.second_s):.0f} |",
        f"| time against dense, median of pairs | 1 | {rows.ratio:.2f} |",
        f"| forward passes | 1 | {len(groups)} |",
        f"| token cells computed | {width} | {cells} ({cells / width - 1:+.1%}) |",
        f"| mask bytes | {width**2} | 0 |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--packed-width", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    target = HFEagle3TargetModel.from_pretrained(
        local_model(args.model),
        device=args.device,
        dtype=args.dtype if args.dtype == "auto" else getattr(torch, args.dtype),
    )
    lines = [
        "# Cost of capture",
        "",
        f"- machine: {machine(torch.device(args.device))}",
        f"- command: `{' '.join(['python benchmarks/bench_capture.py', *sys.argv[1:]])}`",
        f"- commit: {commit()}; target {args.model}, {target.info().weight_dtypes}",
        "",
        *padded_rows_table(target, args),
        "",
        *packed_row_table(target, args),
        "",
    ]
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text("\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
