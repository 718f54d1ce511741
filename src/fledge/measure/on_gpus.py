"""Speed-ups of drafts of the shipped recipes on a GPU, for users of machines without a speed-up.
The figures (`on_gpus.json`) come from `SOURCE`, which also lists the commands.
"""

import json
from dataclasses import dataclass
from pathlib import Path

SOURCE = "benchmarks/results/smollm2_decoding.md"


@dataclass(frozen=True)
class MeasuredGain:
    """A speed-up measured one text at a time, with recorded passes, in bfloat16."""

    target: str
    method: str  # strategy of drafting
    gpu: str
    recipe: str  # that trained the draft
    drafted: int  # tokens per round
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
    """The measured gain for this target and strategy; None if there is none."""
    matches = (gain for gain in measured_gains() if (gain.target, gain.method) == (target, method))
    return next(matches, None)
