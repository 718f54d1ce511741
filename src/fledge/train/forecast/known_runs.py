"""Which finished runs a forecast may go by: those that are named, else those beside the run, else
the few that come with fledge. Reads files, computes nothing: see `guides.py`.

`known_runs.json` holds curves of shipped recipes on one H200, out of tests/train/curves, where
benchmarks/results/forecast.md says how they were made.
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
from fledge.target.kinds import model_name
from fledge.train.forecast.curves import METRICS_NAME, Curve, read_curve
from fledge.train.forecast.forecast import FEWEST_WINDOWS
from fledge.train.forecast.formula import MISFIT
from fledge.train.forecast.guides import OTHER_SETTINGS, Known

_MOST = 12  # runs beside one, the newest
_DECIDING = ("data", "packing", "draft", "objective", "training")  # sections
_FREE = {
    "training": {"seed", "steps", "epochs", "extend", "device", "record_steps"},
    "data": {"workers"},
}


@dataclass(frozen=True)
class Kind:
    """What a run trains, as far as its course depends on it."""

    method: str
    target: str  # without the place it is kept at
    settings: str  # equal where only seed and length may differ

    @classmethod
    def of(cls, recipe: Recipe) -> "Kind":
        held = recipe.model_dump(mode="json", include=set(_DECIDING), exclude=_FREE)
        words = json.dumps(held, sort_keys=True).encode()
        target = _bare(model_name(recipe.target))
        return cls(recipe.objective.kind, target, hashlib.sha256(words).hexdigest()[:16])

    def misfit(self, other: "Kind") -> float:
        """Share of a gain by which a run of the other kind may part from one of this."""
        if self.target != other.target:
            return MISFIT
        return 0.0 if self.settings == other.settings else OTHER_SETTINGS


def known_runs(run: Path, like: Sequence[Path] = ()) -> list[Known]:
    """Those that a run's forecast goes by; BadInput where one of `like` cannot be gone by."""
    if like:
        kind = Kind.of(_recipe(run))
        return [_named(kind, other) for other in dict.fromkeys(like)]
    # nobody asked for them: where they cannot be read, the run's own curve is left
    with contextlib.suppress(BadInput, OSError):
        kind = Kind.of(_recipe(run))
        return _beside(kind, run) or _shipped(kind)
    return []


def _named(kind: Kind, other: Path) -> Known:
    if not other.is_dir():
        raise BadInput("no such run", where=str(other))
    theirs, curve = Kind.of(_recipe(other)), read_curve(other)
    if theirs.method != kind.method:
        what = f"a run of another method ('{theirs.method}', not '{kind.method}')"
        raise BadInput(what, where=str(other), fix="give --like runs of the same method")
    if missing := _missing(curve):
        raise BadInput(missing, where=str(other), fix="give --like runs that are over")
    return Known(_name(other), curve, kind.misfit(theirs))


def _recipe(run: Path) -> Recipe:
    if not (run / RESOLVED_NAME).is_file():
        raise BadInput(f"not a run of fledge: no {RESOLVED_NAME}", where=str(run))
    return load_recipe(run / RESOLVED_NAME)


def _missing(curve: Curve) -> str:
    """What keeps a run from being gone by; nothing: it can be."""
    if curve.step < curve.course.steps:
        return f"not finished: step {curve.step:,} of {curve.course.steps:,}"
    if not curve.measured or not curve.depths:
        return "no held-out evaluation"
    if len(curve.windows) < FEWEST_WINDOWS:
        return f"fewer than {FEWEST_WINDOWS} lines of metrics"
    return ""


def _beside(kind: Kind, run: Path) -> list[Known]:
    """Finished runs in the same folder, of the same method and target; others are passed over."""
    own, found = run.resolve(), []
    places = [place for place in own.parent.iterdir() if (place / METRICS_NAME).is_file()]
    places.sort(key=lambda place: (place / METRICS_NAME).stat().st_mtime, reverse=True)
    for place in places:
        if place.resolve() == own:
            continue
        with contextlib.suppress(BadInput, OSError):
            theirs = Kind.of(_recipe(place))
            if (theirs.method, theirs.target) == (kind.method, kind.target):
                curve = read_curve(place)
                if not _missing(curve):
                    found.append(Known(_name(place), curve, kind.misfit(theirs)))
        if len(found) == _MOST:
            break
    return found


def _shipped(kind: Kind) -> list[Known]:
    held: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [
        Known(one["name"], Curve.from_json(one["curve"]), MISFIT)
        for one in held
        if one["method"] == kind.method and kind.target in one["targets"]
    ]


def _name(run: Path) -> str:
    return run.absolute().name


def _bare(model: str) -> str:
    return Path(model).name.lower()
