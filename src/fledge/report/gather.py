"""What a run left behind, as one plain value: the page's data. Reads files, runs nothing.

    RUN/metrics.jsonl    training steps and held-out evaluations    (train)
    RUN/recipe.yaml      the resolved recipe                        (train)
    RUN/machine.json     what it ran on                             (train)
    RUN/eval.json        figures and answers token by token         (fledge eval --out)

Only the metrics are needed; the page leaves out what is not there, and says how to get it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from fledge import __version__
from fledge.core.errors import BadInput, first_line
from fledge.core.machine import MACHINE_NAME
from fledge.methods.registry import METHODS

EVALUATION_NAME = "eval.json"
MOST_POINTS = 600  # of a curve: more than a screen can show
_CURVES = ("loss", "lr", "grad_norm", "tokens_per_s", "target_share", "tau")


def gather(run: Path, evaluation: Path | None = None) -> dict[str, Any]:
    """The page's data; `evaluation` None takes the run's own, if there is one."""
    steps, held_out = _metrics(run / "metrics.jsonl")
    recipe = _recipe(run / "recipe.yaml")
    if evaluation is None and (run / EVALUATION_NAME).is_file():
        evaluation = run / EVALUATION_NAME
    machine, kind = run / MACHINE_NAME, recipe.get("objective", {}).get("kind", "")
    return {
        "name": recipe.get("run", {}).get("name") or run.absolute().name,
        "version": __version__,
        "target": recipe.get("target", {}).get("model", ""),
        "method": METHODS[kind].title if kind in METHODS else kind,
        "training": _curves(steps),
        "held_out": _held_out(held_out),
        "evaluation": None if evaluation is None else _evaluation(evaluation),
        "recipe": recipe,
        "machine": _json(machine) if machine.is_file() else None,
    }


def _metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(lines about training steps, lines about evaluations)."""
    if not path.is_file():
        raise BadInput("not a run of fledge: no metrics.jsonl", where=str(path.parent))
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break  # the run is being written to, or was killed
    steps = [line for line in lines if "loss" in line]
    return steps, [line for line in lines if "evaluation" in line]


def _recipe(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = yaml.safe_load(path.read_bytes())
    except yaml.YAMLError as error:
        raise BadInput(f"not YAML ({first_line(error)})", where=str(path)) from None
    return value if isinstance(value, dict) else {}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"not JSON ({error})", where=str(path)) from None


def _evaluation(path: Path) -> Any:
    value = _json(path)
    if not isinstance(value, dict) or not isinstance(value.get("drafts"), list):
        raise BadInput("not figures of `fledge eval --out`", where=str(path))
    return value


def _curves(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Columns over steps, thinned evenly; per depth where a value is a list."""
    kept = _thinned(lines)
    columns: dict[str, Any] = {"step": [line["step"] for line in kept]}
    columns |= {name: [line.get(name) for line in kept] for name in _CURVES}
    depths = max((len(line.get("prefix_acceptance", [])) for line in kept), default=0)
    columns["joint"] = [[line["prefix_acceptance"][k] for line in kept] for k in range(depths)]
    columns["seconds"] = lines[-1].get("seconds") if lines else None
    return columns


def _held_out(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Evaluations over steps. Runs from before replay know every-slot figures only."""
    evaluations = [line["evaluation"] for line in lines]
    replayed = all("acceptance_length" in evaluation for evaluation in evaluations)
    length, joint = ("acceptance_length", "joint") if replayed else ("tau", "prefix_acceptance")
    depths = max((len(evaluation[joint]) for evaluation in evaluations), default=0)
    lengths = [evaluation[length] for evaluation in evaluations]
    steps = [line["step"] for line in lines]
    best = max(range(len(steps)), key=lambda i: (steps[i] > 0, lengths[i]), default=None)
    return {
        "replayed": replayed,
        "step": steps,
        "length": lengths,
        "joint": [[evaluation[joint][k] for evaluation in evaluations] for k in range(depths)],
        "best": best,
    }


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """At most MOST_POINTS of them, first and last included."""
    count = len(lines)
    if count <= MOST_POINTS:
        return list(lines)
    return [lines[i * (count - 1) // (MOST_POINTS - 1)] for i in range(MOST_POINTS)]
