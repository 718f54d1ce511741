"""Help pages that render on every terminal: plain text, no markup, no truncated names.

Typer's boxes read `[http://...]` as a style and drop it, and truncate long flags at 80 columns.
Here pages are laid out by click's plain formatter; verbs are listed with their whole first
paragraph, and examples are not broken, so that they can be copied.
"""

from collections.abc import Callable
from typing import Any

import typer
import typer.core

_EXAMPLE = "Example: "
_LARGEST = 2**48  # number of any option but a seed, as in recipes; sizes made of it fit 64 bits


class Verb(typer.core.TyperCommand):
    """A verb with such a help page, which accepts no numbers beyond `_LARGEST`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest: list[str] = super().parse_args(ctx, args)
        params: list[Any] = self.params  # Typer's own class or click's, depending on its version
        for param in params:
            value = ctx.params.get(param.name) if param.name != "seed" else None
            for number in value if isinstance(value, list) else (value,):
                if isinstance(number, int | float) and not number <= _LARGEST:
                    what = f"{number} is not a number up to {_LARGEST}"
                    raise typer.BadParameter(what, ctx=ctx, param=param)
        return rest

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(self.epilog, formatter)


class VerbGroup(typer.core.TyperGroup):
    """A group of verbs with such a help page."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            assert command is not None
            paragraph = (command.help or "").partition("\n\n")[0]
            rows.append((name, " ".join(paragraph.split())))
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_examples(self.epilog, formatter)


class Verbs(typer.Typer):
    """A `Typer` whose verbs and groups have such help pages."""

    def __init__(self, *, cls: type[VerbGroup] = VerbGroup, **options: Any) -> None:
        super().__init__(cls=cls, rich_markup_mode=None, no_args_is_help=True, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        return super().command(name, **{"cls": Verb, **options})


def examples_of(epilog: str) -> list[str]:
    """The command lines of an epilog, which holds one `Example: ...` per paragraph."""
    return [text.removeprefix(_EXAMPLE) for text in epilog.split("\n\n") if text]


def _write_examples(epilog: str | None, formatter: Any) -> None:
    if not (examples := examples_of(epilog or "")):
        return
    with formatter.section("Example" if len(examples) == 1 else "Examples"):
        for example in examples:  # unbroken, so that it can be copied
            formatter.write(f"  {example}\n")
