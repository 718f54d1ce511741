"""All output to a terminal: strings are shown literally, never as control codes or markup.

A command that prints through `Terminal` is safe without further effort. Styles are set with
`style=`, or with `marked`, whose template is trusted and whose values are not.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.text import Text

from fledge.core.progress import PlainProgress
from fledge.core.text import visible


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

    def waiting(self, text: str) -> AbstractContextManager[Any]:
        """A spinner with a text (which `status` would parse as markup); without a terminal, a line
        at intervals."""
        if self.is_terminal:
            return self.status(Text(visible(text)))
        return PlainProgress(self.say, text)
