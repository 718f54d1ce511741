"""The `fledge` command: verbs in one file each, errors in one line.

Nothing here, nor at the top of a verb's file, imports torch: `--help` must answer at once.
"""

import errno
import os
import sys

# Before torch is loaded: idle CPU threads sleep instead of spinning. On a busy machine spinning
# threads halve the speed of everybody, this program included.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer
from rich.console import Console

from fledge import __version__
from fledge.errors import BadInput

# Typer carries its own copy of click (older ones import it): its public name leads to UsageError.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="fledge",
    help="Train draft models for speculative decoding, and measure honestly what they gain.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        print(f"fledge {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version."
    ),
) -> None:
    """Verbs attach themselves below."""


def _attach_verbs() -> None:
    from fledge.cli import (
        bench,
        cache,
        chat,
        data,
        demo,
        diagnose,
        doctor,
        eval,
        export,
        import_draft,
        plan,
        precompute,
        recipe,
        regenerate,
        report,
        serve,
        serve_target,
        train,
    )

    app.add_typer(bench.app, name="bench")
    app.add_typer(cache.app, name="cache")
    app.command(name="chat", epilog=chat.EXAMPLE)(chat.chat)
    app.add_typer(data.app, name="data")
    app.command(name="demo", epilog=demo.EXAMPLE)(demo.demo)
    app.command(name="diagnose", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
    app.command(name="doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
    app.command(name="eval", epilog=eval.EXAMPLE)(eval.evaluate)
    app.command(name="export", epilog=export.EXAMPLE)(export.export)
    app.command(name="import", epilog=import_draft.EXAMPLE)(import_draft.import_draft)
    app.command(name="plan", epilog=plan.EXAMPLE)(plan.plan)
    app.command(name="precompute", epilog=precompute.EXAMPLE)(precompute.precompute)
    app.add_typer(recipe.app, name="recipe")
    app.command(name="regenerate", epilog=regenerate.EXAMPLE)(regenerate.regenerate)
    app.command(name="report", epilog=report.EXAMPLE)(report.report)
    app.command(name="serve-target", epilog=serve_target.EXAMPLE)(serve_target.serve_target)
    app.command(name="serve", epilog=serve.EXAMPLE)(serve.serve)
    app.command(name="train", epilog=train.EXAMPLE)(train.train)


_attach_verbs()


def run(argv: list[str] | None = None) -> None:
    """Entry point: bad input is one line and exit code 2, an interrupt 130."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    try:
        code = app(args=argv, standalone_mode=False)
        if code == 130:  # Typer turns an interrupt into this code without a word
            raise KeyboardInterrupt
    except (BadInput, _UsageError) as error:
        text = str(error) if isinstance(error, BadInput) else error.format_message()  # type: ignore[attr-defined]
        errors.print("fledge: ", style="bold red", end="")
        errors.print(" ".join(text.split()))
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("fledge: interrupted")
        sys.exit(130)
    except BrokenPipeError:  # `fledge data preview | head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        errors.print("fledge: ", style="bold red", end="")
        errors.print(f"the disk is full{where}; make room and run the same command again")
        sys.exit(3)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    run()
