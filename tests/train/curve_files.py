"""Curves of real runs, as `benchmarks/collect_curves.py` keeps them."""

import json
from pathlib import Path

from fledge.train.curves import Curve

_PLACE = Path(__file__).parent / "curves"


def real_curve(name: str) -> Curve:
    return Curve.from_json(json.loads((_PLACE / f"{name}.json").read_text()))


def real_curves() -> dict[str, Curve]:
    return {path.stem: real_curve(path.stem) for path in sorted(_PLACE.glob("*.json"))}
