"""Operations of one training step, and which lines hold its memory at the peak."""

from collections import defaultdict
from typing import Any

import torch

from fledge.target.state_cache import colocated
from fledge.training.batches import StepBatch
from fledge.training.planning.step_cost import MetaStep
from fledge.training.step import Parts, train_step


def step_flops(parts: Parts, batch: StepBatch, step: MetaStep) -> float:
    """Operations of a training step's matrix products: the target once, unless it remembers what it
    said, and what `step` counts. Attention counts what is visible; padding counts nothing."""
    total = 0.0
    target: Any = colocated(parts.target)
    remembers = target is not parts.target
    for rows in batch.micro:
        if rows is None:
            continue
        total += step.training(rows, parts.seed).operations
        if remembers:
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


def profile_step(parts: Parts, batch: StepBatch) -> str:
    """Torch's own tables of one step: kernels by GPU time, then calls by CPU time."""
    from torch.profiler import ProfilerActivity, profile

    gpu = parts.device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    with profile(activities=kinds) as measured:
        train_step(parts, batch, lr=1e-4)
        parts.clock.read()
    keys = ["self_device_time_total"] * gpu + ["self_cpu_time_total"]
    average = measured.key_averages()
    return "\n".join(
        average.table(sort_by=key, row_limit=30, max_name_column_width=60) for key in keys
    )
