"""One line on stderr while something slow happens that happens only once."""

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
    """A spinner on a terminal; elsewhere a plain line, and another now and then. Yields what says
    how far it is."""
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
    """Takes the place of stderr while libraries draw bars there: their percentages are told on,
    the rest is not shown."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def write(self, text: str) -> int:
        found = _PERCENT.findall(text)
        if found:
            self._tell(f"{found[-1]} %")
        return len(text)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """While open, transformers draws no bars and prints no tables; then as it was."""
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
