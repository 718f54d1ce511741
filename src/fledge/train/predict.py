"""What a run will cost: memory, disk, hours, predicted first and later compared with the run.

The model is simple on purpose. Memory: weights, moments and gradients are counted exactly, what a
step holds besides is counted from the widths of its tensors. Time: operations over a device rate
that was measured for this kind of work, not a data sheet's.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Column, Table
from torch import nn

from fledge.target.kinds import kind_of

if TYPE_CHECKING:
    from fledge.train.setup import Training

# Measured on whole steps: operations per second (a CPU's per thread), and seconds that a step takes
# however small it is. H200: 8B shape 0.43 s, 135M shape 0.15 s a step. CPU: two cores, float32.
_RATES = {"cpu": 55e9, "cuda": 600e12}
_STEP_SECONDS = {"cpu": 0.02, "cuda": 0.12}


@dataclass(frozen=True)
class Prediction:
    target_bytes: int
    draft_bytes: int  # weights, gradients, moments: 16 bytes a trained parameter
    step_bytes: int  # what one step holds besides
    disk_bytes: int
    seconds: float
    tokens: int

    @property
    def peak_bytes(self) -> int:
        return self.target_bytes + self.draft_bytes + self.step_bytes

    def line(self) -> str:
        return f"{_size(self.peak_bytes)} of memory, {_time(self.seconds)}"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "peak_bytes": self.peak_bytes}

    def table(self, truth: dict[str, Any] | None = None) -> Table:
        table = Table("", Column("predicted", justify="right"), title="plan", box=None)
        table.title_justify = "left"
        rows = [
            ("peak memory", _size(self.peak_bytes), "peak_bytes"),
            ("disk", _size(self.disk_bytes), "disk_bytes"),
            ("time", _time(self.seconds), "seconds"),
        ]
        if truth is None:
            parts = {"target": self.target_bytes, "draft and optimizer": self.draft_bytes}
            for part, size in {**parts, "one step": self.step_bytes}.items():
                table.add_row(f"  {part}", _size(size), style="dim")
            for name, shown, _ in rows:
                table.add_row(name, shown)
            return table
        table.add_column("measured", justify="right")
        for name, shown, key in rows:
            measured = _time(truth[key]) if key == "seconds" else _size(truth[key])
            table.add_row(name, shown, measured)
        return table


def predict(training: "Training") -> Prediction:
    """Cost of a run that is set up: its target and draft are there to be counted."""
    recipe, parts, stream, draft = training.recipe, training.parts, training.stream, training.draft
    target_bytes = sum(p.nbytes for p in _target_weights(training)) + _kept_states(training)
    trained = sum(p.numel() for p in parts.parameters)
    frozen = sum(p.numel() for p in draft.parameters()) - trained
    depths = parts.objective.depths
    tokens_per_step = recipe.training.micro_batch * stream.tokens
    tokens = stream.steps * stream.packs_per_step * stream.tokens
    config, width = draft.config, 2 if parts.device.type == "cuda" else 4
    # Per token and depth the backward keeps: q, k, v, attention's output, MLP's gate and up, norms.
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    per_depth = heads * config.head_dim + 2 * config.intermediate_size + 5 * config.hidden_size
    layer_bytes = tokens_per_step * depths * per_depth * width * config.num_hidden_layers
    state_width = (config.num_aux_hidden_states + 1) * config.target_hidden_size
    states = tokens_per_step * state_width * width * recipe.training.accumulate
    chunk = 4 * (1 << 26) * 4  # the head's chunk of logits, probabilities and gradients
    head_grad = config.draft_vocab_size * config.hidden_size * 4
    disk = (recipe.checkpoint.keep + 1) * (4 * (trained + frozen) + 8 * trained)
    return Prediction(
        target_bytes=target_bytes,
        draft_bytes=16 * trained + 4 * frozen,
        step_bytes=int(layer_bytes + 2 * states + chunk + head_grad),
        disk_bytes=disk,
        seconds=_seconds(training, tokens),
        tokens=tokens,
    )


def _target_weights(training: "Training") -> list[nn.Parameter]:
    """Cost of a target in this process; others run elsewhere."""
    module = training.parts.target.info().module
    return [] if module is None else list(module.parameters())


def _kept_states(training: "Training") -> int:
    config = training.draft.config
    per_token = (config.num_aux_hidden_states + 1) * config.target_hidden_size * 4
    wanted: int = int(training.stream.rows.lengths.sum()) * per_token
    return min(_kept_at_most(training), wanted)


def _kept_at_most(training: "Training") -> int:
    section = training.recipe.target
    return kind_of(section).kept_bytes(section)


def _seconds(training: "Training", tokens: int) -> float:
    kind = training.parts.device.type
    rate = _RATES[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    per_rank = _operations(training, tokens) / training.parts.world.size
    return per_rank / rate + training.stream.steps * _STEP_SECONDS[kind]


def _operations(training: "Training", tokens: int) -> float:
    """Multiply-adds counted twice: the target's forward, the draft's rollout with its backward."""
    parts, config = training.parts, training.draft.config
    target = sum(p.numel() for p in _target_weights(training) if p.ndim == 2)
    section = training.recipe.training
    reused = section.epochs if section.steps is None and _kept_at_most(training) else 1
    weights = training.draft.named_parameters()
    layer = sum(p.numel() for name, p in weights if name.startswith("layers.") and p.ndim == 2)
    head = config.draft_vocab_size * config.hidden_size
    depths = parts.objective.depths
    supervised = 0.8  # a usual share; what is not supervised pays almost nothing
    draft = (
        6 * supervised * depths * (layer + head)
        + 6 * config.num_aux_hidden_states * config.hidden_size**2
    )
    operations: float = tokens * (2.0 * target / reused + draft)
    return operations


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
