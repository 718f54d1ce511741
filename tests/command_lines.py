"""Check that a line with `fledge ...` is a valid command: its verb, its flags, its recipe keys."""

import re
import shlex
from pathlib import Path

import typer.main

from fledge.cli.main import app
from fledge.recipe.schema import load_recipe, split_arguments

ROOT = Path(__file__).parent.parent
COMMAND = r"((?:[A-Z_]+=\S+ )?fledge [a-z][^`\n]*)"
TAKES_RECIPE = ("train", "plan", "precompute", "recipe")


def words_of(line: str) -> list[str]:
    """The arguments after `fledge`, without comments, pipes and anything before the command."""
    words = shlex.split(re.split(r"\s#|\s[|>&]|;|\s\(|\sthen:", line)[0])
    return words[words.index("fledge") + 1 :]


def understand(line: str) -> None:
    """Raise what typer or the recipe loader raises if the command does not exist."""
    words, command = words_of(line), typer.main.get_command(app)
    context = command.make_context("fledge", [], resilient_parsing=True)
    verb = words[0]
    while hasattr(command, "commands") and words:
        _, command, words = command.resolve_command(context, words)
        assert command is not None, f"no such command: {line}"
        context = command.make_context(verb, [], parent=context, resilient_parsing=True)
    if not any(word.startswith("-") or "=" in word or "." in word or "/" in word for word in words):
        return  # a mention, not a command line
    if any(re.fullmatch(r"[A-Z]|\.\.\.|\[.*", word) for word in words):
        return  # has placeholders or an ellipsis
    parsed = command.make_context(verb, list(words)).params
    if verb in TAKES_RECIPE and parsed.get("arguments"):
        path, overrides = split_arguments(parsed["arguments"])
        if path is not None and str(path).startswith("recipes/"):
            path = ROOT / path
        elif path is not None and path.suffix:  # stands for a file of the reader's
            path = None
        load_recipe(path, overrides)
