"""What drafts of shipped recipes gained on a GPU, for those who measure on a machine that gains
nothing. The figures (`on_gpus.json`) are those of `SOURCE`, where the commands stand.
"""

import json
from dataclasses import dataclass
from pathlib import Path

SOURCE = "benchmarks/results/smollm2_decoding.md"


@dataclass(frozen=True)
class MeasuredGain:
    """One text at a time, with recorded passes, bfloat16."""

    target: str
    method: str  # of drafting
    gpu: str
    recipe: str  # whose draft it was
    drafted: int  # tokens a round
    length: float  # acceptance length
    break_even: float
    speedup: float
    plain_tokens_per_s: float
    tokens_per_s: float
    training_s: float


def measured_gains() -> list[MeasuredGain]:
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [MeasuredGain(**row) for row in rows]


def gain_on_a_gpu(target: str, method: str) -> MeasuredGain | None:
    """What is known of this target and this way of drafting."""
    known = (one for one in measured_gains() if (one.target, one.method) == (target, method))
    return next(known, None)
