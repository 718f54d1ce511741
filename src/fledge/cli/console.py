"""What every verb shares: output streams, progress bars, JSON."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import progress
from rich.table import Table

from fledge.core.machine import is_main_rank
from fledge.core.progress import PlainProgress
from fledge.core.terminal import Terminal
from fledge.core.text import json_text, visible

# Results go to stdout, everything else goes to stderr: `fledge ... --json | jq` works.
out = Terminal()
err = Terminal(stderr=True)


def quiet_libraries() -> None:
    """Our own bars and lines are enough: transformers draws a bar for every model it loads, and
    prints a table about weights that do not fit, which are refused in one line anyway."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Plain JSON on stdout, however narrow the terminal; one line is there at once."""
    sys.stdout.write(json_text(value, indent=None if one_line else 2) + "\n")
    if one_line:
        sys.stdout.flush()


def plain_table(*columns: str, words: int = 1, no_wrap: bool = False, title: str = "") -> Table:
    """A plain table: the first `words` columns hold words, the others numbers."""
    plain = Table(title=title or None, title_justify="left", box=None)
    for index, column in enumerate(columns):
        plain.add_column(column, justify="right" if index >= words else "left", no_wrap=no_wrap)
    return plain


def facts_table(facts: Mapping[str, str]) -> Table:
    """Names and what is known of them, without a heading."""
    plain = Table(show_header=False, box=None)
    for name, text in facts.items():
        plain.add_row(name.replace("_", " "), text)
    return plain


@contextlib.contextmanager
def shown_on_stderr() -> Iterator[None]:
    """While open, what verbs show goes to stderr: the JSON of all of them has stdout to itself."""
    out.stderr = True
    try:
        yield
    finally:
        out.stderr = False


@contextlib.contextmanager
def progress_bar(what: str, unit: str = "") -> Iterator[Callable[..., None]]:
    """A bar with counts, elapsed and remaining time, and a free text column; it is moved by
    `update(total=, completed=, advance=, description=, unit=, note=, now=)`.

    Without a terminal it is a plain line every few seconds, and one at once for `now=True`.
    """
    if not err.is_terminal:
        with _plain_lines(what, unit) as update:
            yield update
        return
    columns = (
        progress.TextColumn("{task.description}", style="bold", markup=False),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[unit]}", markup=False),
        progress.TextColumn("{task.fields[note]}", markup=False),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(visible(what), total=None, unit=visible(unit), note="")

        def update(*, now: bool = False, **changes: Any) -> None:
            texts = {k: visible(v) for k, v in changes.items() if isinstance(v, str)}
            bar.update(task, **{**changes, **texts})

        yield update


@contextlib.contextmanager
def _plain_lines(what: str, unit: str) -> Iterator[Callable[..., None]]:
    """Of several processes only the first one speaks."""
    if not is_main_rank():
        yield lambda **_: None
        return
    with PlainProgress(err.say, what, unit) as plain:
        yield plain.update


@contextlib.contextmanager
def watching() -> Iterator[Callable[[str, float, int], None]]:
    """One bar that says what is going on: `watch(what, done, total)`."""
    with progress_bar("") as update:
        yield lambda what, done, total: update(description=what, completed=done, total=total)
