"""What the demo ships: chats answered by SmolLM2-135M-Instruct itself, and its recipe.

The chats are made by tools/make_demo_chats.py from prompts written for this project.
"""

from pathlib import Path

CHATS = Path(__file__).parent / "chats.jsonl"
RECIPE = Path(__file__).parent / "recipe.yaml"
ROWS = 120  # chats to train on: as many as two cores handle in a few minutes
