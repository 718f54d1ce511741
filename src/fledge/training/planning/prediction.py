"""Predicts the cost of a run in memory, disk space and time, for comparison with the run itself.

The model is simple on purpose. Memory: weights, moments and gradients are counted exactly, and what
a step needs on top is computed from the widths of its tensors. Time: start-up and data preparation
are already over when a run is predicted; steps, evaluations and checkpoints are counted and
multiplied by what each of them costs on this machine (`cost.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Column, Table

from fledge.target.kinds import kind_of
from fledge.training.checkpoint import newest_step
from fledge.training.planning.cost import (
    DraftMemory,
    Pace,
    StepMemory,
    pace_of,
    sampled_rows,
    target_weights,
)
from fledge.training.planning.step_cost import without_memory

if TYPE_CHECKING:
    from fledge.target.state_cache import KeptStates
    from fledge.training.setup import Training

# Fixed seconds per step, whatever its size; bytes per second of the update, which reads and writes
# weights, gradients and moments; bytes per second of a checkpoint, checksums included.
STEP_SECONDS = {"cpu": 0.02, "cuda": 0.12}
UPDATE_BYTES = {"cpu": 5e9, "cuda": 2e12}
SAVE_BYTES = 250e6

PARTS = ("start_up", "data", "steps", "evaluations", "checkpoints")


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

    @classmethod
    def of_all(cls, drafts: "Sequence[Prediction]") -> "Prediction":
        """The total of several drafts that take their steps in turn. Only the prediction of the
        first includes the target's time."""
        last = drafts[-1].seconds_by_part  # its start-up time includes the trials of all drafts
        in_turn = {part: sum(draft.seconds_by_part[part] for draft in drafts) for part in PARTS[2:]}
        return cls(
            target_bytes=max(draft.target_bytes for draft in drafts),
            draft_bytes=sum(draft.draft_bytes for draft in drafts),
            step_bytes=max(draft.step_bytes for draft in drafts),
            disk_bytes=sum(draft.disk_bytes for draft in drafts),
            seconds_by_part={part: last[part] for part in PARTS[:2]} | in_turn,
            tokens=drafts[0].tokens,
        )

    def line(self) -> str:
        return f"{_size(self.peak_bytes)} of memory, {_time(self.seconds)}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": self.seconds, "peak_bytes": self.peak_bytes}

    def table(self, truth: dict[str, Any] | None = None) -> Table:
        table = Table("", Column("predicted", justify="right"), title="plan", box=None)
        table.title_justify = "left"
        if truth is not None:
            table.add_column("measured", justify="right")
        permanent = {"target": self.target_bytes, "draft and optimizer": self.draft_bytes}
        for part, size in {**permanent, "one step": self.step_bytes}.items():
            if truth is None:
                table.add_row(f"  {part}", _size(size), style="dim")
        actual = truth or {}
        for name, size, key in (
            ("peak memory", self.peak_bytes, "peak_bytes"),
            ("disk", self.disk_bytes, "disk_bytes"),
        ):
            table.add_row(name, _size(size), *([_size(actual[key])] if actual else []))
        for part, seconds in self.seconds_by_part.items():
            measured = [_time(actual["seconds_by_part"][part])] if actual else []
            table.add_row(f"  {part.replace('_', '-')}", _time(seconds), *measured, style="dim")
        table.add_row("time", _time(self.seconds), *([_time(actual["seconds"])] if actual else []))
        return table


def predict_together(trainings: "Sequence[Training]", begin: float | None = None) -> Prediction:
    """Predict the runs of several drafts, whose target answers once for all of them."""
    first = trainings[0]
    return Prediction.of_all([predict(each, begin, asks=each is first) for each in trainings])


def predict(training: "Training", begin: float | None = None, *, asks: bool = True) -> Prediction:
    """Predict a run that is set up, so that its target and draft can be counted. `begin`: when the
    command started, by `time.perf_counter`. `asks`: include the target's time."""
    recipe, world, stream = training.recipe, training.parts.world, training.stream
    target_bytes = sum(p.nbytes for p in target_weights(training)) + _kept_states(training)
    memory = DraftMemory.of(training.draft, recipe.training)
    tokens = stream.steps * stream.packs_per_step * stream.tokens
    step = step_memory(training)
    pace = pace_of(training, step)
    remaining = _seconds(training, pace if asks else replace(pace, target_s=0.0), memory)
    now = time.perf_counter()
    start_up_s = 0.0 if begin is None else now - begin - training.data_s
    return Prediction(
        target_bytes=target_bytes,
        draft_bytes=memory.bytes(shard=world.shard, width=_width(training)),
        step_bytes=step.bytes(world.context),
        disk_bytes=(recipe.checkpoint.keep + 1) * memory.saved_bytes,
        seconds_by_part={"start_up": start_up_s, "data": training.data_s, **remaining},
        tokens=tokens,
    )


def step_memory(training: "Training") -> StepMemory:
    """The memory of a step of the run, for any number of ranks."""
    recipe, on_gpu = training.recipe, training.parts.device.type == "cuda"
    draft = without_memory(recipe.method, training.draft.config, training.draft)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return StepMemory.of(draft, sampled_rows(training), recipe, dtype)


def _width(training: "Training") -> int:
    """Bytes per element in a step's computations."""
    return 2 if training.parts.device.type == "cuda" else 4


def _kept_states(training: "Training") -> int:
    """Bytes of target states kept in the memory of the training device."""
    limits, needed = _states(training)
    on_host = limits.host_bytes if training.parts.device.type == "cpu" else 0
    return min(limits.device_bytes + on_host, needed)


def _states(training: "Training") -> "tuple[KeptStates, int]":
    """(how many of the target's states may be kept, bytes of those on all training rows)."""
    config, section = training.draft.config, training.recipe.target
    limits = kind_of(section).kept_states(section)
    per_token = (config.num_aux_hidden_states + 1) * config.target_hidden_size * _width(training)
    return limits, int(training.stream.rows.lengths.sum()) * int(per_token)


def _seconds(training: "Training", pace: Pace, memory: DraftMemory) -> dict[str, float]:
    """Seconds of the remaining work, from the newest checkpoint on."""
    recipe, stream, world = training.recipe, training.stream, training.parts.world
    device = training.parts.device.type
    start, total = newest_step(training.directory), stream.steps
    # Padding is not counted: it costs next to nothing.
    packs = stream.packs_per_step // world.data_size * max(0, total - start)
    tokens = packs * stream.tokens * (1 - stream.padding_share)
    held_out = sum(int(batch.attention_mask.sum()) for batch in training.held_out) / world.size
    evaluations = times(start, total, recipe.evaluation.every_steps) if training.held_out else set()
    # Every evaluation may find the best draft so far, which is then saved.
    saves = times(start, total, recipe.checkpoint.every_steps) | evaluations
    target_tokens, target_held_out = tokens, held_out * len(evaluations)
    if _keeps_all(training):  # then the target computes each row once
        target_tokens, target_held_out = min(tokens, float(stream.rows.lengths.sum())), held_out
    update = STEP_SECONDS[device] + 36 * memory.trained / UPDATE_BYTES[device]
    return {
        "steps": target_tokens * pace.target_s
        + tokens * pace.step_s
        + max(0, total - start) * update,
        "evaluations": target_held_out * pace.target_s
        + held_out * (len(evaluations) * pace.replay_s + pace.picks_s),
        "checkpoints": len(saves - {0}) * memory.saved_bytes / SAVE_BYTES,
    }


def times(begun: int, total: int, every: int) -> set[int]:
    """The remaining steps at which something happens that is due every `every` steps, at the end,
    and before the first step."""
    if begun >= total:
        return set()
    due = {*range(begun + every - begun % every, total, every), total}
    return due | {0} if begun == 0 else due


def _keeps_all(training: "Training") -> bool:
    """Whether the states of all training rows fit into the memory reserved for them."""
    limits, needed = _states(training)
    return 0 < needed <= limits.device_bytes + limits.host_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def directory_bytes(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file() and not f.is_symlink())


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
