"""Curves of runs: real ones, as `benchmarks/collect_curves.py` keeps them, and synthetic ones."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from fledge.training.forecast.curves import Course, Curve
from fledge.training.forecast.forecast import length_of

_PLACE = Path(__file__).parent / "curves"


def real_curve(name: str) -> Curve:
    return Curve.from_json(json.loads((_PLACE / f"{name}.json").read_text()))


def real_curves() -> dict[str, Curve]:
    return {path.stem: real_curve(path.stem) for path in sorted(_PLACE.glob("*.json"))}


def made(slope, level, schedule, *, noise=0.0, seed=0, every=5, steps=1000, depths=6):
    """A run whose held-out log-odds follow a known law: linear in ln S (S: the summed learning
    rate) for the first fifth, then flattening."""
    course = Course(steps, warmup=20, schedule=schedule)
    at, rates = course.rates()
    summed = np.concatenate([[1e-3], np.cumsum((rates[1:] + rates[:-1]) / 2 * np.diff(at))])
    ahead = np.log(np.maximum(summed, 1e-3) / np.interp(steps / 5, at, summed))
    # written out here, independently of the tested code
    bent = np.where(ahead > 0, -np.expm1(-0.6 * np.maximum(ahead, 0)) / 0.6, ahead)
    odds = level + slope * bent + 0.25 * (np.maximum.accumulate(rates) - rates)
    random = np.random.default_rng(seed)

    def lengths(where, link):
        x = np.interp(where, at, odds) * (1.35 if link else 1.0) + (0.3 if link else 0.0)
        x = x + noise * random.standard_normal(len(x))
        return length_of(1 / (1 + np.exp(-x)), depths)

    middles = np.arange(0, steps, every) + every / 2
    measured = np.arange(50, steps + 1, 50)
    return Curve(
        course=course,
        depths=depths,
        trained_depths=depths,
        windows=tuple(zip(middles.tolist(), lengths(middles, True).tolist(), strict=True)),
        measured=tuple(
            (int(step), float(length), 20_000)
            for step, length in zip(measured, lengths(measured, False), strict=True)
        ),
        seconds=3600.0,
        step=steps,
    )


def written(run, curve, recipe, *, joint=(0.6, 0.35, 0.2), epochs=1):
    """Write the files that a run with this curve would have written; returns its directory."""
    recipe.write_resolved(run)
    lines = []
    for index, (middle, tau) in enumerate(curve.windows):
        step = round(2 * middle - (lines[-1]["step"] if lines else 0))
        lines.append(
            {
                "step": step, "loss": 1.0, "tau": tau, "seconds": step * 1.0,
                "epoch": index * epochs // len(curve.windows), "depth_loss": [1.0] * curve.depths,
            }
        )  # fmt: skip
    for step, length, rounds in curve.measured:
        conditional = [after / before for before, after in pairwise((1.0, *joint))]
        figures = {
            "acceptance_length": length, "rounds": rounds, "tau": 2.0, "joint": list(joint),
            "conditional": conditional,
        }  # fmt: skip
        lines.append({"step": step, "evaluation": figures})
    lines.sort(key=lambda line: line["step"])
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run
