"""Conversations as rows."""

import json


def chat(*texts, **fields):
    """The user and the assistant take turns."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns, **fields}


def numbered(i):
    return chat(f"Say {i}", f"{i}!")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
