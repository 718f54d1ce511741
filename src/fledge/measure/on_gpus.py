"""What drafts of shipped recipes gained on a GPU, for those who measure on a machine that gains
nothing. The figures are those of benchmarks/results/smollm2_decoding.md, where the commands stand.
"""

from dataclasses import dataclass


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


_SMOLLM2 = "smollm2-135m"
MEASURED = (
    MeasuredGain(_SMOLLM2, "chain", "H200", "smollm2_gpu", 7, 2.78, 1.36, 2.09),
    MeasuredGain(_SMOLLM2, "tree", "H200", "smollm2_gpu", 24, 3.56, 1.76, 2.02),
    MeasuredGain(_SMOLLM2, "parallel", "H200", "smollm2_peagle_gpu", 7, 2.12, 1.25, 1.70),
)


def gain_on_a_gpu(target: str, method: str) -> MeasuredGain | None:
    """What is known of this target and this way of drafting."""
    return next((one for one in MEASURED if (one.target, one.method) == (target, method)), None)
