"""The report page: its data, collected from the files of a run, and one self-contained HTML file.

    RUN/metrics.jsonl    training steps and held-out evaluations    (train)
    RUN/recipe.yaml      the resolved recipe                        (train)
    RUN/machine.json     what it ran on                             (train)
    RUN/eval.json        figures and answers token by token         (fledge eval --out)

Only the metrics are required; the page omits what is missing, and says how to get it. `page.html`,
`page.css`, `charts.js` and `page.js` are next to this file and written by hand; there is no build
step and no library. A content security policy in the page forbids every request.
"""

import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fledge import __version__
from fledge.core.errors import BadInput
from fledge.core.machine import MACHINE_NAME
from fledge.core.reading import ListOf, Maybe, Table, read_bytes, read_json
from fledge.methods.registry import METHODS
from fledge.recipe.yaml_text import parse_yaml
from fledge.training.curves import CURVES, known_runs, read_curve, read_metrics
from fledge.training.forecast import forecast, limits_of

EVALUATION_NAME = "eval.json"
MOST_POINTS = 600  # of a curve: more than a screen can show
_EVALUATION = Table({"drafts": ListOf(Table(), most=4096)}, optional={"target": Maybe(Table())})


def gather(run: Path, evaluation: Path | None = None) -> dict[str, Any]:
    """The page's data; `evaluation` defaults to the run's own, if it has one."""
    steps, held_out = read_metrics(run)
    recipe = _recipe(run / "recipe.yaml")
    sections = {name: recipe.get(name) or {} for name in ("objective", "run", "target")}
    if evaluation is None and (run / EVALUATION_NAME).is_file():
        evaluation = run / EVALUATION_NAME
    machine, kind = run / MACHINE_NAME, str(sections["objective"].get("kind", ""))
    return {
        "name": str(sections["run"].get("name") or run.absolute().name),
        "version": __version__,
        "target": str(sections["target"].get("model") or ""),
        "method": METHODS[kind].title if kind in METHODS else kind,
        "training": _curves(steps),
        "held_out": _held_out(held_out),
        "forecast": _forecast(run),
        "evaluation": None if evaluation is None else _evaluation(evaluation),
        "recipe": recipe,
        "machine": read_json(machine) if machine.is_file() else None,
    }


def _recipe(path: Path) -> dict[str, Any]:
    """The recipe as written, by any version."""
    if not path.is_file():
        return {}
    value, _ = parse_yaml(read_bytes(path, what="the recipe"), where=str(path))
    return value or {}


def _evaluation(path: Path) -> Any:
    fix = "give the figures of `fledge eval --out`"
    what = "the file of figures"
    return read_json(path, _EVALUATION, what=what, fix=fix)


def _forecast(run: Path) -> dict[str, Any] | None:
    """The run's forecast; None if there is too little data or its recipe cannot be read."""
    try:
        ahead = forecast(read_curve(run), known=known_runs(run))
        limits = limits_of(run, ahead)
    except BadInput:
        return None
    return {
        **ahead.to_json(),
        "by_whom": ahead.by_whom(),
        "limits": [limit._asdict() for limit in limits],
    }


def _curves(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns over steps, thinned evenly; one column per depth where a value is a list."""
    kept = _thinned(lines)
    columns: dict[str, Any] = {"step": [line["step"] for line in kept]}
    columns |= {name: [line.get(name) for line in kept] for name in CURVES}
    depths = max((len(line.get("prefix_acceptance", [])) for line in kept), default=0)
    columns["joint"] = _by_depth([line.get("prefix_acceptance", []) for line in kept], depths)
    columns["seconds"] = lines[-1].get("seconds") if lines else None
    return columns


def _held_out(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Evaluations over steps."""
    evaluations = [line["evaluation"] for line in lines]
    rates = [evaluation.get("joint", []) for evaluation in evaluations]
    depths = max(map(len, rates), default=0)
    lengths = [evaluation.get("acceptance_length", 0.0) for evaluation in evaluations]
    steps = [line["step"] for line in lines]
    best = max(range(len(steps)), key=lambda i: (steps[i] > 0, lengths[i]), default=None)
    return {
        "step": steps,
        "length": lengths,
        "joint": _by_depth(rates, depths),
        "best": best,
    }


def _by_depth(rates: Sequence[Sequence[Any]], depths: int) -> list[list[Any]]:
    """One curve per depth, with None where a line has fewer depths."""
    return [[line[k] if k < len(line) else None for line in rates] for k in range(depths)]


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS of the lines, including the first and the last."""
    count = len(lines)
    if count <= MOST_POINTS:
        return list(lines)
    return [lines[i * (count - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]


# --- page ----------------------------------------------------------------------------------------


_HERE = Path(__file__).parent


def render(data: dict[str, Any]) -> str:
    """The page as text."""
    # "<" is escaped, so that no text in the data can end the surrounding script element.
    embedded = json.dumps(_finite(data), ensure_ascii=False).replace("<", "\\u003c")
    parts = {
        "title": escape(f"{data['name']} · fledge report", quote=False),
        "style": (_HERE / "page.css").read_text(),
        "script": "\n".join((_HERE / name).read_text() for name in ("charts.js", "page.js")),
        "data": embedded,
    }
    page = (_HERE / "page.html").read_text()
    pieces = page.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:  # in one pass, so that inserted text is never read as a placeholder
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled).encode(errors="replace").decode()  # a lone surrogate cannot be encoded


def _finite(value: Any) -> Any:
    """Replace NaN and infinity, which are not JSON, by None: a diverged run's curve has gaps."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value
