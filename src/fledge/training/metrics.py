"""Turns sums and counts into readable metrics, and writes them to files and trackers."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.install import install_extra
from fledge.core.reading import Table, Whole, parse_json
from fledge.training.step import Sums

_LINE = Table({"step": Whole()})


def acceptance_metrics(sums: Sums) -> dict[str, Any]:
    """Rates per depth and the acceptance length that they imply; synchronizes with the device."""
    hits_K, valid_K = sums.hits_K.tolist(), sums.valid_K.tolist()
    prefix = [hit / max(1, valid) for hit, valid in zip(hits_K, valid_K, strict=True)]
    return {
        "tau": 1.0 + sum(prefix),  # joint prefix acceptance length, including the bonus token
        "prefix_acceptance": prefix,
        "conditional_accuracy": _rates(sums.hits_K, sums.reached_K),
        "accuracy": _rates(sums.correct_K, sums.charged_K),
        "depth_loss": _rates(sums.loss_K, sums.charged_K),
        "supervised": int(valid_K[0]) if valid_K else 0,
    }


def _rates(part_K: Tensor, whole_K: Tensor) -> list[float]:
    rates: list[float] = (part_K.double() / whole_K.double().clamp_min(1)).tolist()
    return rates


@dataclass(frozen=True)
class Tracker:
    log: Callable[[int, dict[str, float]], None]
    close: Callable[[], None]


class MetricsFile:
    """`metrics.jsonl`: one line per logged step, truncated to the step that a run resumes from."""

    def __init__(self, path: Path, *, resume_at: int) -> None:
        self.path = path
        kept = []
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                try:
                    value = parse_json(line, _LINE, where=str(path))
                except BadInput:
                    break  # a line that a killed process did not finish
                if value["step"] <= resume_at:
                    kept.append(line)
        with atomic_file(path) as handle:
            handle.writelines(kept)
        self._handle = path.open("a")

    def write(self, values: dict[str, Any]) -> None:
        self._handle.write(json.dumps(values) + "\n")
        self._handle.flush()

    def close(self) -> None:
        self._handle.close()


def flat_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Scalars by name, as trackers expect them; a list becomes one scalar per depth."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            flat |= {f"{name}/{i}": float(item) for i, item in enumerate(value)}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[name] = float(value)
    return flat


def open_trackers(
    names: tuple[str, ...], *, project: str, run: str, directory: Path
) -> list[Tracker]:
    """Open the trackers that a recipe names; each package is imported only if it is needed."""
    makers = {"tensorboard": _tensorboard, "wandb": _wandb}
    opened = []
    for name in names:
        try:
            opened.append(makers[name](project, run, directory))
        except ImportError as error:
            what, fix = f"tracker {name} is not installed ({error})", install_extra("track")
            raise BadInput(what, fix=fix) from None
    return opened


def _tensorboard(project: str, run: str, directory: Path) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(directory / "tensorboard"))

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def _wandb(project: str, run: str, directory: Path) -> Tracker:
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    files_dir = str(directory)
    opened = wandb.init(project=project, name=run, dir=files_dir, resume="allow", id=run)
    return Tracker(lambda step, values: opened.log(values, step=step), opened.finish)
