"""What the demo ships: chats answered by SmolLM2-135M-Instruct itself, its recipe, and what the
same target gains on a GPU.

The chats are made by tools/make_demo_chats.py from prompts written for this project.
"""

from dataclasses import dataclass
from pathlib import Path

CHATS = Path(__file__).parent / "chats.jsonl"
RECIPE = Path(__file__).parent / "recipe.yaml"
ROWS = 200  # of the chats, as many as two cores digest in a few minutes


@dataclass(frozen=True)
class OnAGpu:
    """What a draft gained when it was decoded with, one text at a time."""

    name: str
    recipe: str
    training_s: float
    acceptance_length: float
    plain_tokens_per_s: float
    tokens_per_s: float
    speed_up: float
    source: str  # the page of this repository that says how it was measured


ON_A_GPU = OnAGpu(
    name="H200",
    recipe="smollm2_gpu",
    training_s=140,
    acceptance_length=2.78,
    plain_tokens_per_s=300,
    tokens_per_s=625,
    speed_up=2.09,
    source="benchmarks/results/smollm2_decoding.md",
)
