"""One line on stderr while something slow happens that happens only once."""

import contextlib
import sys
from collections.abc import Iterator

from fledge.core.terminal import Terminal


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """A spinner on a terminal, a plain line elsewhere."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    terminal = Terminal(file=sys.stderr, soft_wrap=True)
    if terminal.is_terminal:
        with terminal.waiting(text):
            yield
    else:
        terminal.say(f"{text} ...")
        yield
