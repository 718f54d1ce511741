"""Shared by all verbs: output streams, tables, progress bars, JSON."""

import contextlib
import copy
import io
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import rich.progress
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fledge.core.machine import is_main_rank
from fledge.core.progress import PlainProgress, Progress, unwatched
from fledge.core.terminal import Terminal, json_text, visible

# Results go to stdout, everything else goes to stderr: `fledge ... --json | jq` works.
out = Terminal()
err = Terminal(stderr=True)


def quiet_libraries() -> None:
    """Silence transformers, which draws a bar for every model it loads and prints a table of
    mismatched weights; fledge has its own bars and rejects such weights in one line."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def print_json(value: Any, *, one_line: bool = False) -> None:
    """Print plain JSON on stdout, never wrapped; a single line is flushed at once."""
    sys.stdout.write(json_text(value, indent=None if one_line else 2) + "\n")
    if one_line:
        sys.stdout.flush()


class WideTable(Table):
    """A table whose title and caption use the terminal's width, not their own table's."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bare = copy.copy(self)
        bare.title = bare.caption = None
        if self.title:
            yield Text(str(self.title), style="table.title")
        yield from Table.__rich_console__(bare, console, options)
        if self.caption:
            yield Text(str(self.caption), style="table.caption")


def in_color() -> bool:
    """Whether standard output shows colors; elsewhere, marks stand for them."""
    return out.color_system is not None and not out.no_color


def plain_table(*columns: str, words: int = 1, no_wrap: bool = False, title: str = "") -> Table:
    """A borderless table: the first `words` columns hold text, the others numbers."""
    table = WideTable(title=title or None, box=None)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index >= words else "left", no_wrap=no_wrap)
    return table


def facts_table(facts: Mapping[str, str]) -> Table:
    """A table of names and values, without a header."""
    table = Table(show_header=False, box=None)
    for name, text in facts.items():
        table.add_row(name.replace("_", " "), text)
    return table


def html_page(texts: Iterable[Text]) -> str:
    """A self-contained page that shows the texts as a terminal would."""
    page = Console(record=True, file=io.StringIO(), width=120)
    for text in texts:
        page.print(text, end="\n\n")
    return page.export_html()


@contextlib.contextmanager
def shown_on_stderr() -> Iterator[None]:
    """Redirect `out` to stderr, so that stdout holds nothing but the JSON printed at the end."""
    out.stderr = True
    try:
        yield
    finally:
        out.stderr = False


@contextlib.contextmanager
def progress_bar(what: str = "") -> Iterator[Progress]:
    """The main rank's bar with counts, elapsed and remaining time, and a note; without a terminal
    a line every few seconds."""
    if not is_main_rank():
        yield unwatched
    elif err.is_terminal:
        with _Bar.columns() as columns:
            yield _Bar(columns, what)
    else:
        yield PlainProgress(partial(err.say, style="cyan"))


class _Bar(Progress):
    """A bar on a terminal."""

    def __init__(self, columns: rich.progress.Progress, what: str) -> None:
        self._columns = columns
        self._task = columns.add_task(visible(what), total=None, unit="", note="")

    @staticmethod
    def columns() -> rich.progress.Progress:
        return rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", style="bold", markup=False),
            rich.progress.BarColumn(),
            rich.progress.TaskProgressColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TextColumn("{task.fields[unit]}", markup=False),
            rich.progress.TextColumn("{task.fields[note]}", markup=False),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=err,
            transient=True,
        )

    def __call__(
        self, what: str, done: float = 0, total: float = 0, unit: str = "", note: str = "", *,
        now: bool = False,
    ) -> None:  # fmt: skip
        self._columns.update(
            self._task, description=visible(what), completed=done, total=total or None,
            unit=visible(unit), note=visible(note),
        )  # fmt: skip

    def say(self, text: str) -> None:
        err.say(text, style="cyan")
