"""Predicts the cost of a run in memory, disk space and time, for comparison with the run itself.

Memory: weights, moments and gradients are exact, and what a step needs on top is counted
(`step_cost.py`). Time: start-up and data preparation are already over when a run is predicted;
steps, evaluations and checkpoints are counted and multiplied by what each of them costs here.

A CPU's speed depends on its cores, and on what else uses them: a step of the run is timed. A GPU
would first compile for minutes, so its speed is a rate that was measured on whole steps. A target
inside an engine is timed even there: it compiles nothing, and does not reveal how many weights it
has or over how many GPUs they are split.
"""

import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.table import Column, Table
from torch import nn

from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.target.finite_check import NotFinite
from fledge.target.kinds import kind_of
from fledge.target.state_cache import colocated
from fledge.training.checkpoint import newest_step
from fledge.training.planning.step_cost import DraftMemory, StepMemory, typical_rows, without_memory
from fledge.training.sharding import whole

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe
    from fledge.training.setup import Training

# Operations per second, measured on whole steps (CPU: per thread, float32; H200: 0.43 s per step of
# the 8B shape, 0.15 s of the 135M shape).
RATES = {"cpu": 55e9, "cuda": 600e12}
# Fixed seconds per step, whatever its size; bytes per second of the update, which reads and writes
# weights, gradients and moments; bytes per second of a checkpoint, checksums included.
STEP_SECONDS = {"cpu": 0.02, "cuda": 0.12}
UPDATE_BYTES = {"cpu": 5e9, "cuda": 2e12}
SAVE_BYTES = 250e6
EVALUATION = 2 / 3  # of a step's time: the rollouts run twice, but not backward

PARTS = ("start_up", "steps", "evaluations", "checkpoints")
_SAMPLED = 2  # micro-batches of a run, of whose steps the largest counts


@dataclass(frozen=True)
class Prediction:
    target_bytes: int
    draft_bytes: int  # weights, gradients, moments: usually 16 bytes per trained parameter
    step_bytes: int  # what one step needs on top
    disk_bytes: int
    seconds_by_part: dict[str, float]  # of PARTS
    tokens: int

    @property
    def seconds(self) -> float:
        return sum(self.seconds_by_part.values())

    @property
    def peak_bytes(self) -> int:
        return self.target_bytes + self.draft_bytes + self.step_bytes

    def line(self) -> str:
        return f"{_size(self.peak_bytes)} of memory, {_time(self.seconds)}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "peak_bytes": self.peak_bytes}

    def table(self, truth: dict[str, Any] | None = None) -> Table:
        """Memory, disk and time by part; with the truth beside them once it is known."""
        table = Table("", Column("predicted", justify="right"), title="plan", box=None)
        table.title_justify = "left"
        if truth is None:
            table.add_row("  target", _size(self.target_bytes), style="dim")
            table.add_row("  draft and optimizer", _size(self.draft_bytes), style="dim")
            table.add_row("  one step", _size(self.step_bytes), style="dim")
        else:
            table.add_column("measured", justify="right")
        sides = [self.to_json()] + ([] if truth is None else [truth])
        table.add_row("peak memory", *(_size(side["peak_bytes"]) for side in sides))
        table.add_row("disk", *(_size(side["disk_bytes"]) for side in sides))
        for part in PARTS:
            seconds = self.seconds_by_part[part]
            table.add_row(f"  {part.replace('_', '-')}", _time(seconds), style="dim")
        table.add_row("time", *(_time(side["seconds"]) for side in sides))
        return table


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Pace:
    """Seconds per token on one rank."""

    target_s: float  # the target's forward
    step_s: float  # the draft's rollouts, forward and backward
    evaluation_s: float  # of held-out rows: the target, and the rollouts scored and replayed


@dataclass(frozen=True)
class Work:
    """What is left to do for one rank."""

    begun: int  # steps
    total: int
    tokens: float  # of training, without padding: it costs next to nothing
    held_out: float  # tokens of one evaluation
    rows: float | None = None  # tokens of all rows, if their states are kept: computed once

    def seconds(
        self, recipe: "Recipe", pace: Pace, memory: DraftMemory, device: str, sharing_s: float = 0.0
    ) -> dict[str, float]:
        """Seconds of steps, evaluations and checkpoints; `sharing_s`: of the ranks' gradients."""
        evaluated = set[int]()
        if self.held_out:
            evaluated = times(self.begun, self.total, recipe.evaluation.every_steps)
        # Every evaluation may find the best draft so far, which is then saved.
        saves = times(self.begun, self.total, recipe.checkpoint.every_steps) | evaluated
        kept_tokens, kept_evaluations = 0.0, 0
        if self.rows is not None:
            kept_tokens = max(0.0, self.tokens - self.rows)
            kept_evaluations = max(0, len(evaluated) - 1)
        update_bytes = 36 * memory.trained / recipe.training.shard
        update_s = STEP_SECONDS[device] + update_bytes / UPDATE_BYTES[device] + sharing_s
        return {
            "steps": self.tokens * (pace.target_s + pace.step_s)
            - kept_tokens * pace.target_s
            + max(0, self.total - self.begun) * update_s,
            "evaluations": self.held_out * len(evaluated) * pace.evaluation_s
            - self.held_out * kept_evaluations * pace.target_s,
            "checkpoints": len(saves - {0}) * memory.saved_bytes / SAVE_BYTES,
        }


def times(begun: int, total: int, every: int) -> set[int]:
    """The remaining steps at which something happens that is due every `every` steps, at the end,
    and before the first step."""
    if begun >= total:
        return set()
    due = {*range(begun + every - begun % every, total, every), total}
    return due | {0} if begun == 0 else due


# --- a run that is set up -------------------------------------------------------------------------


def predict(training: "Training", begin: float | None = None) -> Prediction:
    """Predict a run that is set up, so that its target and draft can be counted. `begin`: when the
    command started, by `time.perf_counter`."""
    recipe, world, stream = training.recipe, training.parts.world, training.stream
    device = training.parts.device.type
    step, memory = step_memory(training), DraftMemory.of(training.draft, recipe.training)
    pace = pace_of(training, step)
    width = step.step.dtype.itemsize
    room, rows = kind_of(recipe.target).kept_bytes(recipe.target), int(stream.rows.lengths.sum())
    config = training.draft.config
    state_bytes = (config.num_aux_hidden_states + 1) * config.target_hidden_size
    kept_bytes = rows * state_bytes * width
    keeps_all = 0 < kept_bytes <= room
    begun = newest_step(training.directory)
    packs = stream.packs_per_step // world.data_size * max(0, stream.steps - begun)
    work = Work(
        begun, stream.steps, packs * stream.tokens * (1 - stream.padding_share),
        sum(int(batch.attention_mask.sum()) for batch in training.held_out) / world.size,
        rows if keeps_all else None,
    )  # fmt: skip
    remaining = work.seconds(recipe, pace, memory, device)
    start_up_s = 0.0 if begin is None else time.perf_counter() - begin
    weights = sum(p.nbytes for p in target_weights(training))
    return Prediction(
        target_bytes=weights + min(room, kept_bytes),
        draft_bytes=memory.bytes(shard=world.shard, width=width),
        step_bytes=step.bytes(world.context),
        disk_bytes=(recipe.checkpoint.keep + 1) * memory.saved_bytes,
        seconds_by_part={"start_up": start_up_s, **remaining},
        tokens=stream.steps * stream.packs_per_step * stream.tokens,
    )


def step_memory(training: "Training") -> StepMemory:
    """The memory of a step of the run, for any number of ranks."""
    recipe, dtype = training.recipe, training.parts.objective.compute_dtype or torch.float32
    draft = without_memory(recipe.method, training.draft.config, training.draft)
    return StepMemory.of(draft, sampled_rows(training), recipe, dtype)


def sampled_rows(training: "Training") -> list[TokenBatch]:
    """The first micro-batches of this rank; typical ones if it has none."""
    recipe, stream = training.recipe, training.stream
    batches = islice(stream.micro_batches_before(stream.steps), _SAMPLED)
    return [collated() for collated in batches] or [
        typical_rows(recipe.training.micro_batch, stream.tokens, document=recipe.data.max_length)
    ]


def target_weights(training: "Training") -> list[nn.Parameter]:
    """The parameters of a target in this process; empty for a target that runs elsewhere."""
    module = training.parts.target.info().module
    return [] if module is None else list(module.parameters())


def pace_of(training: "Training", step: StepMemory) -> Pace:
    """The pace of a run: operations by the measured rate; what can be timed here is."""
    parts, device = training.parts, training.parts.device.type
    rate = RATES[device] * (torch.get_num_threads() if device == "cpu" else 1)
    tokens = int(step.rows.attention_mask.sum())  # without padding
    target_s = 2 * sum(p.numel() for p in target_weights(training) if p.ndim == 2) / rate
    step_s = step.cost.operations / tokens / rate
    waits_here = device == "cpu" and not parts.target.supports_async
    with suppress(NotFinite, TargetUnreachable):  # the run itself reports these better
        if waits_here or parts.target.inside_engine:
            target_s, trial_s = _trial(training, step.rows, steps=waits_here)
            step_s = trial_s or step_s
    return Pace(target_s, step_s / parts.world.context, target_s + EVALUATION * step_s)


def _trial(training: "Training", rows: TokenBatch, *, steps: bool) -> tuple[float, float]:
    """Seconds per token of the target and, if asked, of a step; the first passes of a process are
    slow and do not count."""
    parts, objective = training.parts, training.parts.objective
    # Bypass the states that a target keeps in memory: those belong to the run.
    target, was_training = colocated(parts.target) or parts.target, training.draft.training
    moments = [0.0] * 3
    try:
        with torch.random.fork_rng(devices=[]), whole(training.draft):
            training.draft.train()
            for _ in range(2):
                moments[0] = _now(parts.device)
                answer = target.answer(rows).to(parts.device)
                moments[1] = moments[2] = _now(parts.device)
                if steps:
                    ready = objective.prepare(rows, answer, seed=0)
                    objective.score(ready, ready.charged_K).loss.backward()  # type: ignore[no-untyped-call]
                    moments[2] = _now(parts.device)
    finally:
        training.draft.train(was_training)
        for parameter in parts.parameters:
            parameter.grad = None
    target_s, step_s = np.diff(moments) / float(rows.attention_mask.sum())
    return float(target_s), float(step_s)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- the truth ------------------------------------------------------------------------------------


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def directory_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink())
