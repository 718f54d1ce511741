"""Is a line that mentions `fledge ...` a command that exists? Verbs, flags and keys count."""

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
    """A command line without comments, pipes and what stands before the command."""
    words = shlex.split(re.split(r"\s#|\s[|>&]|;|\s\(|\sthen:", line)[0])
    return words[words.index("fledge") + 1 :]


def understand(line: str) -> None:
    """Raises what typer or the recipe raises about a command that does not exist."""
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
        return  # with letters for numbers, or an ellipsis
    parsed = command.make_context(verb, list(words)).params
    if verb in TAKES_RECIPE and parsed.get("arguments"):
        path, overrides = split_arguments(parsed["arguments"])
        if path is not None and str(path).startswith("recipes/"):
            path = ROOT / path
        elif path is not None and path.suffix:  # one of the reader's own
            path = None
        load_recipe(path, overrides)
