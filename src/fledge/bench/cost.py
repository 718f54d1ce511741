"""Operations of one training step, and which lines hold its memory at the peak."""

from collections import defaultdict
from typing import Any

import torch

from fledge.objective.rollout import RolloutTrainerModule
from fledge.objective.work import Work
from fledge.target.remember import colocated
from fledge.train.batches import StepBatch
from fledge.train.step import Parts, train_step


def step_flops(parts: Parts, batch: StepBatch, work: Work) -> float:
    """Operations of a step's matrix products: the target once, unless it remembers what it said;
    the draft forward and backward.

    Attention counts what is visible. The head counts the elements that are charged, and the
    target's own head the slots that hold a target. Recomputation counts nothing: it is a choice.
    """
    total = 0.0
    objective = parts.objective
    assert isinstance(objective, RolloutTrainerModule)
    target: Any = colocated(parts.target)
    remembers = target is not parts.target
    for rows in batch.micro:
        if rows is None:
            continue
        plan = objective.plan_rows(rows, parts.seed)
        tokens = rows.input_ids.numel()
        lengths = (rows.seq_lens if rows.seq_lens is not None else torch.tensor([tokens])).double()
        seen = float((lengths * (lengths + 1) / 2).sum())  # pairs of query and key
        config = target.model.config
        width = config.num_attention_heads * config.head_dim
        if not remembers:
            total += 2 * _weights(target._layers) * tokens
            total += 4 * width * seen * config.num_hidden_layers
        total += 2 * target.info().head.weight_VD.shape[1] * work.target_logits(plan)
        total += work.planned(plan, seen / max(1, tokens))
    return total


def _weights(modules: Any) -> int:
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)


def memory_at_peak(parts: Parts, batch: StepBatch, rows: int = 20) -> list[tuple[str, float]]:
    """Run a step; at its memory peak, how many GiB each source line held: (source line, GiB)."""
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    train_step(parts, batch, lr=1e-4)
    torch.cuda.synchronize()
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    live: dict[int, tuple[int, str]] = {}
    now = peak = 0
    held: dict[int, tuple[int, str]] = {}
    for event in events:
        if event["action"] == "alloc":
            live[event["addr"]] = (event["size"], _source(event["frames"]))
            now += event["size"]
            if now > peak:
                peak, held = now, dict(live)
        elif event["action"] == "free_completed" and event["addr"] in live:
            now -= live.pop(event["addr"])[0]
    sums: dict[str, float] = defaultdict(float)
    for size, source in held.values():
        sums[source] += size / 2**30
    return sorted(sums.items(), key=lambda item: -item[1])[:rows]


def _source(frames: list[dict[str, Any]]) -> str:
    """The innermost line of ours."""
    for frame in frames:
        if "fledge" in frame["filename"]:
            return f"{frame['filename'].rsplit('/', 1)[-1]}:{frame['line']} {frame['name']}"
    return frames[0]["name"] if frames else "unknown"


def profile(parts: Parts, batch: StepBatch) -> str:
    """Torch's own tables of one step: kernels by GPU time, then calls by CPU time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    gpu = parts.device.type == "cuda"
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * gpu
    with record(activities=kinds) as measured:
        train_step(parts, batch, lr=1e-4)
        parts.clock.read()
    keys = ["self_device_time_total"] * gpu + ["self_cpu_time_total"]
    average = measured.key_averages()
    return "\n".join(
        average.table(sort_by=key, row_limit=30, max_name_column_width=60) for key in keys
    )
