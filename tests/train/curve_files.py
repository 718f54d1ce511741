"""Curves of runs: real ones, as `benchmarks/collect_curves.py` keeps them, and synthetic ones."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from collect_curves import curve_from
from fledge.training.curves import Course, Curve
from fledge.training.forecast import length_of

_PLACE = Path(__file__).parent / "curves"


def real_curve(name: str) -> Curve:
    return curve_from(json.loads((_PLACE / f"{name}.json").read_text()))


def real_curves() -> dict[str, Curve]:
    return {path.stem: real_curve(path.stem) for path in sorted(_PLACE.glob("*.json"))}


TAU = 2.4  # on training rows


def made(slope, level, schedule, *, noise=0.0, seed=0, steps=1000, depths=6):
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

    measured = np.arange(50, steps + 1, 50)
    x = np.interp(measured, at, odds) + noise * random.standard_normal(len(measured))
    lengths = length_of(1 / (1 + np.exp(-x)), depths)
    return Curve(
        course=course,
        depths=depths,
        measured=tuple(
            (int(step), float(length), 20_000)
            for step, length in zip(measured, lengths, strict=True)
        ),
        seconds=3600.0,
        step=steps,
    )


def written(run, curve, recipe, *, joint=(0.6, 0.35, 0.2), epochs=1):
    """Write the files that a run with this curve would have written; returns its directory."""
    recipe.write_resolved(run)
    logged = range(5, curve.step + 1, 5)
    lines = [
        {
            "step": step, "loss": 1.0, "tau": TAU, "seconds": step * 1.0,
            "epoch": index * epochs // len(logged), "depth_loss": [1.0] * curve.depths,
        }
        for index, step in enumerate(logged)
    ]  # fmt: skip
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
