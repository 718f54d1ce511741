"""Reads the curve of a run so far as plain numbers: its metrics, and its schedule.

`read_metrics` is the only reader of `metrics.jsonl`; `read_curve` adds the length of the run from
its recipe and checkpoints; `known_runs` finds finished runs of the same recipe.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.training.checkpoint import STEPS, read_state
from fledge.training.optimizer import learning_rate

METRICS_NAME = "metrics.jsonl"
CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "target_share", "tau")
Floats = NDArray[np.float64]
_GRID = 2048  # number of points over which a schedule is summed
_MAX_RUNS = 12  # the newest ones beside a run
_SECTIONS = {"data", "packing", "draft", "objective", "training"}  # those that shape a curve
_FREE = {
    "training": {"seed", "steps", "epochs", "device", "record_steps"},
    "data": {"workers"},
}


@dataclass(frozen=True)
class Course:
    """The learning-rate schedule of a run, and how often it repeats its data."""

    steps: int
    warmup: int = 0
    schedule: str = "constant"
    final_share: float = 0.0
    decay_share: float = 0.2  # of schedule wsd
    epoch_steps: float = math.inf  # steps per pass over the data; infinite: no repetition is known

    @classmethod
    def of(cls, recipe: Recipe, steps: int, *, epoch_steps: float) -> "Course":
        training, warmup = recipe.training, recipe.training.warmup_steps
        if warmup is None:
            warmup = math.ceil(training.warmup_share * steps)
        schedule, share = training.schedule, training.final_lr_share
        return cls(steps, warmup, schedule, share, training.decay_share, epoch_steps)

    def doubled(self, *, data: bool) -> "Course":
        """The same schedule over twice the steps; `data`: over twice the rows, too."""
        rows = 2 if data else 1
        return replace(self, steps=2 * self.steps, epoch_steps=rows * self.epoch_steps)

    def rates(self) -> tuple[Floats, Floats]:
        """(steps, learning rates as shares of the peak), evenly spaced over the run."""
        steps = np.unique(np.linspace(0, self.steps, min(self.steps, _GRID) + 1).round())
        rate = partial(
            learning_rate, total=self.steps, peak=1.0, warmup=self.warmup, schedule=self.schedule,
            final_share=self.final_share, decay_share=self.decay_share,
        )  # fmt: skip
        return steps, np.array([rate(int(step)) for step in steps])


@dataclass(frozen=True)
class Curve:
    """A run's lengths over its steps, by its held-out evaluations."""

    course: Course
    depths: int  # tokens drafted per round
    measured: tuple[tuple[int, float, int], ...]  # (step, tokens per round, rounds), without step 0
    seconds: float = 0.0  # training time up to `step`
    step: int = 0  # the latest step


def read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(lines about training steps, lines about evaluations)."""
    path = run / METRICS_NAME
    if not path.is_file():
        raise BadInput("not a run of fledge: no metrics.jsonl", where=str(run))
    lines: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # an unfinished line: the run is still writing, or was killed
    steps = [line for line in lines if "loss" in line]
    return steps, [line for line in lines if "evaluation" in line]


def read_curve(run: Path) -> Curve:
    """The curve of a run in its directory, finished or not."""
    logged, measured = read_metrics(run)
    recipe, state = load_recipe(run / RESOLVED_NAME), dict[str, Any]()
    for path in sorted((run / "checkpoints").glob("step-*")):
        with contextlib.suppress(BadInput):
            state = read_state(path)
    steps = state.get(STEPS, 0) or recipe.training.steps or 0
    if not steps:
        what = "no checkpoint says how many steps the run will have"
        raise BadInput(what, where=str(run), fix="wait for the next one")
    return curve_of(recipe, steps, logged, measured)


def curve_of(
    recipe: Recipe,
    steps: int,
    logged: Sequence[dict[str, Any]],
    measured: Sequence[dict[str, Any]],
) -> Curve:
    """The curve from lines of metrics."""
    epoch_steps = steps / recipe.training.epochs
    if recipe.training.steps:  # then a pass ends where the second one begins
        epoch_steps = next((line["step"] for line in logged if line.get("epoch")), math.inf)
    figures = [(line["step"], line["evaluation"]) for line in measured]
    return Curve(
        course=Course.of(recipe, steps, epoch_steps=epoch_steps),
        depths=max((len(values.get("joint", [])) for _, values in figures), default=0),
        measured=tuple(
            (step, float(values["acceptance_length"]), int(values["rounds"]))
            for step, values in figures
            if step
            and values.get("rounds")
            and math.isfinite(values.get("acceptance_length", math.nan))
        ),
        seconds=float(logged[-1].get("seconds") or 0.0) if logged else 0.0,
        step=max([line["step"] for line in (*logged, *measured)], default=0),
    )


# --- known runs ----------------------------------------------------------------------------------


class Known(NamedTuple):
    """A finished run that shows what may be ahead of another."""

    name: str
    curve: Curve


@dataclass(frozen=True)
class Kind:
    """What determines the curve of a run."""

    method: str
    target: str  # name without its directory
    settings: str  # a hash, equal for runs that differ at most in seed and length

    @classmethod
    def of(cls, recipe: Recipe) -> "Kind":
        settings = recipe.model_dump(mode="json", include=_SECTIONS, exclude=_FREE)
        settings_json = json.dumps(settings, sort_keys=True).encode()
        # only what the recipe says: runs lie beside others whose servers must not be contacted
        target = Path(recipe.target.model or "").name.lower()
        return cls(recipe.objective.kind, target, hashlib.sha256(settings_json).hexdigest()[:16])


def known_runs(run: Path, like: Sequence[Path] = ()) -> list[Known]:
    """The finished runs that a run's forecast uses: those of `like`, of which each must be usable,
    else those of the same recipe beside the run."""
    if like:
        method = load_recipe(run / RESOLVED_NAME).objective.kind
        return [_known(other, method) for other in dict.fromkeys(like)]
    known: list[Known] = []
    # Optional: without them, the forecast uses the run's own curve.
    with contextlib.suppress(BadInput, OSError):
        kind, resolved = Kind.of(load_recipe(run / RESOLVED_NAME)), run.resolve()
        files = [*resolved.parent.glob(f"*/{METRICS_NAME}")]
        for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True):
            other = file.parent
            with contextlib.suppress(BadInput, OSError):
                recipe = load_recipe(other / RESOLVED_NAME)
                if other.resolve() != resolved and Kind.of(recipe) == kind:
                    known.append(_known(other, kind.method))
            if len(known) == _MAX_RUNS:
                break
    return known


def _known(run: Path, method: str) -> Known:
    curve = read_curve(run)
    own = load_recipe(run / RESOLVED_NAME).objective.kind
    if own != method or curve.step < curve.course.steps or not curve.measured:
        what = f"not a finished run of the method '{method}' with held-out evaluations"
        raise BadInput(what, where=str(run))
    return Known(run.absolute().name, curve)
