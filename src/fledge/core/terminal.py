"""All output to a terminal: strings are shown literally, never as control codes or markup.

A command that prints through `Terminal` is safe without further effort. Styles are set with
`style=`, or with `marked`, whose template is trusted and whose values are not.
"""

import contextlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

# --- text ----------------------------------------------------------------------------------------
# Untrusted text on its way to a terminal: shown, never interpreted.
#
# Roles, file names, and answers of models and servers may contain characters that a terminal
# interprets: clear the screen, change the title, overwrite the line, write from right to left. Here
# such characters are escaped as in source code (`\x1b`). `core.terminal` applies this to everything
# that commands print.


MARKS = "⟦⟧"  # around what would be in color, where there are no colors

# C0 except tab and newline, DEL, C1; bidirectional controls, line and paragraph separators,
# annotation marks; lone surrogates, which cannot even be encoded.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\ufffb"
    "\ud800-\udfff]"
)


def visible(text: str) -> str:
    """The text with control characters escaped; tabs and newlines stay."""
    return _CONTROLS.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def counted(count: int, one: str, many: str = "") -> str:
    """A number with its noun: `1 row`, `2,000 rows`; `many` is the plural if it is irregular."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Readable JSON with control characters escaped, so that it parses to the same value."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class VisibleFormatter(logging.Formatter):
    """Escapes log messages: those of libraries and servers are untrusted text, too."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


# --- terminal -------------------------------------------------------------------------------------


def marked(template: str, *values: str | float) -> Text:
    """Text with rich's markup in the template: `marked("[bold]{:,}[/] rows", count)`."""
    escaped = (escape(visible(value)) if isinstance(value, str) else value for value in values)
    return Text.from_markup(template.format(*escaped), emoji=False)


class Terminal(Console):
    """A console whose strings are plain text, on stdout or stderr."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """A reader that closes the pipe (`| head`) is not a failure: `main.run` exits with 0."""
        raise BrokenPipeError

    def render_str(self, text: str, **options: Any) -> Text:
        """Every string passes through here, including those in tables, before it is measured."""
        return super().render_str(visible(text), **options)

    def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
        """All output passes through here, including `Text` objects built by the caller."""
        for segment in super().render(renderable, options):
            if segment.control:  # rich's own, such as cursor movements of a progress bar
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)

    def say(self, text: str, style: str | None = None) -> None:
        """Print one line, without breaking it in a narrow terminal."""
        self.print(text, style=style, soft_wrap=True)

    def plain(self, text: str, end: str = "\n") -> None:
        """Print text without any layout: tabs stay tabs."""
        self.file.write(visible(text) + end)
        self.file.flush()

    @contextlib.contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """On a terminal, a spinner with a text (which `status` would parse as markup)."""
        with self.status(Text(visible(text))) if self.is_terminal else contextlib.nullcontext():
            yield
