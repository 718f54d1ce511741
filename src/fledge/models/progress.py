"""One line on stderr while something slow happens that happens only once."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """A spinner on a terminal, a plain line elsewhere."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...", markup=False)
        yield
