"""Finds the finished runs that a forecast uses: those that are named, else those beside the run,
else the few that ship with fledge. This only reads files; `guides.py` computes.

`known_runs.json` holds curves of shipped recipes on one H200, taken from tests/train/curves;
benchmarks/results/forecast.md describes how they were made.
"""

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.train.forecast.curves import METRICS_NAME, Curve, read_curve
from fledge.train.forecast.forecast import FEWEST_WINDOWS
from fledge.train.forecast.formula import MISFIT
from fledge.train.forecast.guides import OTHER_SETTINGS, Known

_MAX_RUNS = 12  # the newest ones beside a run
_SECTIONS = ("data", "packing", "draft", "objective", "training")  # those that shape a curve
_FREE = {
    "training": {"seed", "steps", "epochs", "extend", "device", "record_steps"},
    "data": {"workers"},
}


@dataclass(frozen=True)
class Kind:
    """What determines the curve of a run."""

    method: str
    target: str  # name without its directory
    settings: str  # a hash, equal for runs that differ at most in seed and length

    @classmethod
    def of(cls, recipe: Recipe) -> "Kind":
        settings = recipe.model_dump(mode="json", include=set(_SECTIONS), exclude=_FREE)
        settings_json = json.dumps(settings, sort_keys=True).encode()
        # only what the recipe says: runs lie beside others whose servers must not be contacted
        target = _base_name(recipe.target.model or "")
        return cls(recipe.objective.kind, target, hashlib.sha256(settings_json).hexdigest()[:16])

    def misfit(self, other: "Kind") -> float:
        """Share of a gain by which a run of the other kind may deviate from one of this kind."""
        if self.target != other.target:
            return MISFIT
        return 0.0 if self.settings == other.settings else OTHER_SETTINGS


def known_runs(run: Path, like: Sequence[Path] = ()) -> list[Known]:
    """The known runs for a run's forecast; raises BadInput if one of `like` cannot be used."""
    if like:
        kind = Kind.of(_recipe(run))
        return [_named(kind, other) for other in dict.fromkeys(like)]
    # Optional: if they cannot be read, the forecast uses only the run's own curve.
    with contextlib.suppress(BadInput, OSError):
        kind = Kind.of(_recipe(run))
        return _beside(kind, run) or _shipped(kind)
    return []


def _named(kind: Kind, other: Path) -> Known:
    if not other.is_dir():
        raise BadInput("no such run", where=str(other))
    other_kind, curve = Kind.of(_recipe(other)), read_curve(other)
    if other_kind.method != kind.method:
        what = f"a run of another method ('{other_kind.method}', not '{kind.method}')"
        raise BadInput(what, where=str(other), fix="give --like runs of the same method")
    if missing := _missing(curve):
        raise BadInput(missing, where=str(other), fix="give --like runs that are finished")
    return Known(_name(other), curve, kind.misfit(other_kind))


def _recipe(run: Path) -> Recipe:
    if not (run / RESOLVED_NAME).is_file():
        raise BadInput(f"not a run of fledge: no {RESOLVED_NAME}", where=str(run))
    return load_recipe(run / RESOLVED_NAME)


def _missing(curve: Curve) -> str:
    """What makes a run unusable for forecasts; empty if it is usable."""
    if curve.step < curve.course.steps:
        return f"not finished: step {curve.step:,} of {curve.course.steps:,}"
    if not curve.measured or not curve.depths:
        return "no held-out evaluation"
    if len(curve.windows) < FEWEST_WINDOWS:
        return f"fewer than {FEWEST_WINDOWS} lines of metrics"
    return ""


def _beside(kind: Kind, run: Path) -> list[Known]:
    """Finished runs of the same method and target in the same directory; others are skipped."""
    resolved, runs = run.resolve(), []
    folders = [folder for folder in resolved.parent.iterdir() if (folder / METRICS_NAME).is_file()]
    folders.sort(key=lambda folder: (folder / METRICS_NAME).stat().st_mtime, reverse=True)
    for folder in folders:
        if folder.resolve() == resolved:
            continue
        with contextlib.suppress(BadInput, OSError):
            other = Kind.of(_recipe(folder))
            if (other.method, other.target) == (kind.method, kind.target):
                curve = read_curve(folder)
                if not _missing(curve):
                    runs.append(Known(_name(folder), curve, kind.misfit(other)))
        if len(runs) == _MAX_RUNS:
            break
    return runs


def _shipped(kind: Kind) -> list[Known]:
    runs: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [
        Known(run["name"], Curve.from_json(run["curve"]), MISFIT)
        for run in runs
        if run["method"] == kind.method and kind.target in run["targets"]
    ]


def _name(run: Path) -> str:
    return run.absolute().name


def _base_name(model: str) -> str:
    return Path(model).name.lower()
