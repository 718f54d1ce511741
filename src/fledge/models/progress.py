"""One line on stderr while something slow happens that happens only once."""

import contextlib
import sys
from collections.abc import Iterator

from fledge.core.terminal import Terminal


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """A spinner on a terminal; elsewhere a plain line, and another now and then."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    terminal = Terminal(file=sys.stderr, soft_wrap=True)
    if not terminal.is_terminal:
        terminal.say(f"{text} ...")
    with terminal.waiting(text):
        yield
