"""The table of docs/performance.md: the named steps, one after the other, with the ceiling of the
same machine in the same run.

    python benchmarks/step_table.py --steps 5 [--memory] [--json] [--toy]
"""

import argparse
import gc
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from fledge.bench.train_step import Case, measure_step, objective_options
from fledge.methods.registry import METHODS
from fledge.target.state_cache import colocated
from fledge.training.batches import StepBatch
from fledge.training.planning.step_cost import MetaStep, without_memory
from fledge.training.step import Parts, train_step

PACKED = {"seq": 16_384, "documents": 250}
SMALL = {"seq": 4096, "documents": 250}
BLOCKS = "8B, 4 x 2048, 512 blocks of 8 per row, 5 layers"
CASES = {
    "EAGLE-3, 8B, 4 x 2048": Case("8b", batch=4),
    "the same, fp8 target, depth_keep 0.7": Case("8b", batch=4, fp8=True, depth_keep=0.7),
    "EAGLE-3, 8B, second epoch, states kept": Case("8b", batch=4, kept=True),
    "EAGLE-3, 8B, 1 x 32,768": Case("8b", seq=32_768),
    "EAGLE-3, 1B, 8 x 2048": Case("1b", batch=8),
    "P-EAGLE, 8B, 2 x 2048, 8 depths, 4 layers": Case("8b", "peagle", batch=2),
    f"DFlash, {BLOCKS}": Case("8b", "dflash", batch=4),
    f"DSpark, {BLOCKS}": Case("8b", "dspark", batch=4),
}
SMALL_CASES = {  # their steps are recorded, which takes more of them to warm up
    "EAGLE-3, 135M, one pack of 16,384": Case("135m", **PACKED),
    "the same, a later epoch, states kept on the GPU": Case("135m", kept=True, **PACKED),
    "EAGLE-3, 135M, one pack of 4,096": Case("135m", **SMALL),
    "P-EAGLE, 135M, one pack of 4,096": Case("135m", "peagle", **SMALL),
    "DFlash, 135M, one pack of 4,096": Case("135m", "dflash", **SMALL),
    "DSpark, 135M, one pack of 4,096": Case("135m", "dspark", **SMALL),
}
TOY = {kind: Case("tiny", kind, seq=64) for kind in ("eagle3", "peagle", "dflash", "dspark")}
COLUMNS = (
    *("step", "tokens/s", "step ms", "target / supervision / forward / backward / update ms"),
    *("slowest ms", "first step s", "above GiB", "share of ceiling"),
)


def step_flops(case: Case, parts: Parts, batch: StepBatch) -> float:
    """Operations of a training step's matrix products: the target once, unless it remembers what it
    said, and what a step on the meta device counts. Attention counts what is visible, and padding
    nothing."""
    method, draft = METHODS[case.kind], parts.objective.draft_model
    paper = without_memory(method, draft.config, draft)
    paper._spare_gib = draft._spare_gib  # MLPs that are kept are not computed again
    step = MetaStep(method, paper, objective_options(case))
    target: Any = colocated(parts.target)
    total = 0.0
    for rows in batch.micro:
        if rows is None:
            continue
        total += step.training(rows, parts.seed).operations
        if target is not parts.target:
            continue
        assert rows.doc_remaining is not None
        real = rows.attention_mask != 0
        pairs = float((rows.doc_remaining[real] + 1).sum())  # of query and visible key
        config, layers = target.model.config, target._layers
        if not parts.objective.reads_target:  # no layer above the last one that the draft reads
            layers = layers[: max(target.aux_layer_ids) + 1]
        matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.ndim == 2)
        width = config.num_attention_heads * config.head_dim
        total += 2 * matrices * float(real.sum()) + 4 * width * pairs * len(layers)
    return total


def matmul_ceiling(device: torch.device, size: int = 8192) -> float:
    """FLOP/s of one large bf16 product, the best of a few."""
    if device.type == "cpu":
        return float("nan")
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(10):
        begin.record()
        left @ right
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return 2 * size**3 / min(times)


def memory_at_peak(parts: Parts, batch: StepBatch, rows: int = 20) -> list[tuple[str, float]]:
    """Run a step; at its memory peak, how many GiB each source line held: (source line, GiB)."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    train_step(parts, batch, lr=1e-4)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, tuple[int, str]] = {}
    held: list[tuple[int, str]] = []
    now = peak = 0
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _source(event["frames"]))
            now += event["size"]
            if now > peak:
                held, peak = list(live.values()), now
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])[0]
    sums: dict[str, float] = defaultdict(float)
    for size, source in held:
        sums[source] += size / 2**30
    return sorted(sums.items(), key=lambda item: -item[1])[:rows]


def _source(frames: list[dict[str, Any]]) -> str:
    """The innermost line of ours."""
    for frame in frames:
        if "fledge" in frame["filename"]:
            return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return frames[0]["name"] if frames else "unknown"


def markdown_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_row(figures: dict[str, Any]) -> list[str]:
    return [
        figures["step"],
        f"{figures['tokens_per_s']:,}",
        f"{figures['step_ms']:,.0f}",
        " / ".join(f"{ms:,.0f}" for ms in figures["phases_ms"].values()),
        f"{figures['slowest_step_ms']:,.0f}",
        f"{figures['first_step_s']}",
        f"{figures['peak_above_gib'] or float('nan'):.2f}",
        f"{figures['share_of_ceiling']:.0%}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--memory", action="store_true", help="then the lines that hold memory")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--toy", action="store_true", help="tiny shapes on the CPU: is all well?")
    args = parser.parse_args()
    device = torch.device("cpu" if args.toy else "cuda")
    rows, notes = [], list[str]()
    if not args.json:
        print(markdown_line(COLUMNS), markdown_line(["---", "--:", "--:", "---", *["--:"] * 4]),
              sep="\n")  # fmt: skip
    for name, case in TOY.items() if args.toy else (CASES | SMALL_CASES).items():
        warmup = max(args.warmup, 20) if name in SMALL_CASES else args.warmup
        flops = list[float]()

        def look(parts: Parts, batch: StepBatch, case: Case = case) -> None:
            flops.append(step_flops(case, parts, batch))  # noqa: B023  (called in this iteration)
            if args.memory:
                held = memory_at_peak(parts, batch)
                notes.extend(f"{gib:7.2f} GiB  {source}" for source, gib in held)

        measured = measure_step(case, device, steps=args.steps, warmup=warmup, look=look)
        speed = flops[0] / measured.seconds
        share = {"tflops": speed / 1e12, "share_of_ceiling": speed / matmul_ceiling(device)}
        rows.append({"step": name, **measured.to_json(), **share})
        if not args.json:
            print(markdown_line(table_row(rows[-1])), *notes, sep="\n", flush=True)
        notes.clear()
        gc.collect()  # the models are gone when the next ones are built
        torch.cuda.empty_cache()
    if args.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
