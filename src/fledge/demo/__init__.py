"""The chats of the demo, answered by SmolLM2-135M-Instruct (made by tools/make_demo_chats.py)."""

from pathlib import Path

CHATS = Path(__file__).parent / "chats.jsonl"
