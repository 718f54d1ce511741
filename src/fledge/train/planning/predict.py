"""What a run will cost: memory, disk, hours, predicted first and later compared with the run.

The model is simple on purpose. Memory: weights, moments and gradients are counted exactly, what a
step holds besides is counted from the widths of its tensors. Time: start-up and data are over when
a run is predicted; steps, evaluations and checkpoints are counted and multiplied by what each of
them costs here (`pace.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Column, Table

from fledge.target.kinds import kind_of
from fledge.target.room import KeptStates
from fledge.train.checkpoint import newest_step
from fledge.train.planning.memory import StepMemory, draft_bytes, kept_bytes
from fledge.train.planning.pace import Pace, pace_of, target_weights, work_of

if TYPE_CHECKING:
    from fledge.train.setup import Training

# Besides its tokens: seconds that a step takes however small it is, bytes a second of the update
# (which reads and writes weights, gradients and moments) and of a checkpoint, checksums included.
STEP_SECONDS = {"cpu": 0.02, "cuda": 0.12}
UPDATE_BYTES = {"cpu": 5e9, "cuda": 2e12}
SAVE_BYTES = 250e6

PARTS = ("start_up", "data", "steps", "evaluations", "checkpoints")


@dataclass(frozen=True)
class Prediction:
    target_bytes: int
    draft_bytes: int  # weights, gradients, moments: usually 16 bytes a trained parameter
    step_bytes: int  # what one step holds besides
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
        """Of several drafts that take their steps in turn, of which the first was predicted with
        the target's part and the others without."""
        last = drafts[-1].seconds_by_part  # by then, all were tried out
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
        held = {"target": self.target_bytes, "draft and optimizer": self.draft_bytes}
        for part, size in {**held, "one step": self.step_bytes}.items():
            if truth is None:
                table.add_row(f"  {part}", _size(size), style="dim")
        known = truth or {}
        for name, size, key in (
            ("peak memory", self.peak_bytes, "peak_bytes"),
            ("disk", self.disk_bytes, "disk_bytes"),
        ):
            table.add_row(name, _size(size), *([_size(known[key])] if known else []))
        for part, seconds in self.seconds_by_part.items():
            measured = [_time(known["seconds_by_part"][part])] if known else []
            table.add_row(f"  {part.replace('_', '-')}", _time(seconds), *measured, style="dim")
        table.add_row("time", _time(self.seconds), *([_time(known["seconds"])] if known else []))
        return table


def predict_together(trainings: "Sequence[Training]", begin: float | None = None) -> Prediction:
    """Cost of the runs of several drafts, whose target is asked for all of them at once."""
    asks = [index == 0 for index in range(len(trainings))]
    each = [predict(one, begin, asks=ask) for one, ask in zip(trainings, asks, strict=True)]
    return Prediction.of_all(each)


def predict(training: "Training", begin: float | None = None, *, asks: bool = True) -> Prediction:
    """Cost of a run that is set up: its target and draft are there to be counted. `begin`: when the
    command began, by `time.perf_counter`. `asks`: the target's time is this run's, too."""
    recipe, parts, stream, draft = training.recipe, training.parts, training.stream, training.draft
    world = parts.world
    target_bytes = sum(p.nbytes for p in target_weights(training)) + _kept_states(training)
    trained = sum(p.numel() for p in parts.parameters)
    frozen = sum(p.numel() for p in draft.parameters()) - trained
    tokens = stream.steps * stream.packs_per_step * stream.tokens
    kept = kept_bytes(draft, recipe.training)
    saved = 4 * (trained + frozen) + kept
    pace = pace_of(training)
    to_come = _seconds(training, pace if asks else replace(pace, target_s=0.0), trained, saved)
    now = time.perf_counter()
    start_up_s = 0.0 if begin is None else now - begin - training.data_s
    return Prediction(
        target_bytes=target_bytes,
        draft_bytes=draft_bytes(
            trained, frozen, shard=world.shard, width=_width(training), kept=kept
        ),
        step_bytes=step_memory(training).bytes(world.context),
        disk_bytes=(recipe.checkpoint.keep + 1) * saved,
        seconds_by_part={"start_up": start_up_s, "data": training.data_s, **to_come},
        tokens=tokens,
    )


def step_memory(training: "Training") -> StepMemory:
    """What a step of the run holds, on however many ranks."""
    section, stream = training.recipe.training, training.stream
    return StepMemory(
        work_of(training),
        section.micro_batch * stream.tokens,
        section.accumulate,
        _width(training),
    )


def _width(training: "Training") -> int:
    """Bytes of a number that a step computes with."""
    return 2 if training.parts.device.type == "cuda" else 4


def _kept_states(training: "Training") -> int:
    """Where the target is."""
    kept = _room_for_states(training)
    on_host = kept.host_bytes if training.parts.device.type == "cpu" else 0
    return min(kept.device_bytes + on_host, _wanted_states(training))


def _wanted_states(training: "Training") -> int:
    config = training.draft.config
    width = 1 if _room_for_states(training).eight_bits else _width(training)
    per_token = (config.num_aux_hidden_states + 1) * config.target_hidden_size * width
    tokens = int(training.stream.rows.lengths.sum())
    return tokens * int(per_token)


def _room_for_states(training: "Training") -> KeptStates:
    section = training.recipe.target
    return kind_of(section).kept_states(section)


def _seconds(training: "Training", pace: Pace, trained: int, saved: int) -> dict[str, float]:
    """What is still to do, from the newest checkpoint on."""
    recipe, stream, world = training.recipe, training.stream, training.parts.world
    device = training.parts.device.type
    begun, total = newest_step(training.directory), stream.steps
    # packs are padded, and padding costs next to nothing
    packs = stream.packs_per_step // world.data_size * max(0, total - begun)
    tokens = packs * stream.tokens * (1 - stream.padding_share)
    held_out = sum(int(batch.attention_mask.sum()) for batch in training.held_out) / world.size
    measured = times(begun, total, recipe.evaluation.every_steps) if training.held_out else set()
    saves = times(begun, total, recipe.checkpoint.every_steps) | measured  # each may be the best
    asked, asked_held_out = tokens, held_out * len(measured)
    if _keeps_all(training):  # the target is asked about each row once
        asked, asked_held_out = min(tokens, float(stream.rows.lengths.sum())), held_out
    update = STEP_SECONDS[device] + 36 * trained / UPDATE_BYTES[device]
    return {
        "steps": asked * pace.target_s + tokens * pace.step_s + max(0, total - begun) * update,
        "evaluations": asked_held_out * pace.target_s
        + held_out * (len(measured) * pace.replay_s + pace.picks_s),
        "checkpoints": len(saves - {0}) * saved / SAVE_BYTES,
    }


def times(begun: int, total: int, every: int) -> set[int]:
    """The steps at which something is done that is done every so many, at the end, and, if that is
    still to come, before the first."""
    if begun >= total:
        return set()
    due = {*range(begun + every - begun % every, total, every), total}
    return due | {0} if begun == 0 else due


def _keeps_all(training: "Training") -> bool:
    kept = _room_for_states(training)
    return 0 < _wanted_states(training) <= kept.device_bytes + kept.host_bytes


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory in use so far: allocated on the GPU, or resident in this process."""
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
