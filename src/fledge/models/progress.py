"""One line on stderr during slow work that is done only once."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Iterator

from rich.text import Text

from fledge.core.terminal import Terminal
from fledge.core.text import visible

_PERCENT = re.compile(r"(\d+)%")


@contextlib.contextmanager
def phase(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal; elsewhere a plain line, repeated at intervals. Yields a function
    that updates the progress shown."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    terminal = Terminal(file=sys.stderr, soft_wrap=True)
    if terminal.is_terminal:
        with terminal.waiting(text) as spinner:
            yield lambda done: spinner.update(Text(visible(f"{text} {done}")))
    else:
        terminal.say(f"{text} ...")
        with terminal.waiting(text) as lines:
            yield lambda done: lines.update(note=done)


class Percentages(io.StringIO):
    """Replaces stderr while libraries draw progress bars: passes their percentages on and discards
    the rest."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def write(self, text: str) -> int:
        percentages = _PERCENT.findall(text)
        if percentages:
            self._tell(f"{percentages[-1]} %")
        return len(text)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars and tables of transformers; restores its settings at the end."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
