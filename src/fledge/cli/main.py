"""The `fledge` command: verbs in one file each, errors in one line.

Nothing here, nor at the top of a verb's file, imports torch: `--help` must answer at once.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

# Before torch is loaded: idle CPU threads sleep instead of spinning. On a busy machine spinning
# threads halve the speed of every process, this one included.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import typer

from fledge import __version__
from fledge.cli.help import VerbGroup, Verbs
from fledge.cli.launched import said_by_another
from fledge.core.errors import explain, first_line
from fledge.core.terminal import Terminal
from fledge.core.text import VisibleFormatter, visible

# Typer carries its own copy of click (older ones import it): its public name leads to UsageError.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _InOrder(VerbGroup):
    """Typer lists groups after verbs; here they stand in the order of work."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_ORDER)


_ORDER = (
    *("demo", "doctor"),
    *(
        "data",
        "regenerate",
        "serve-target",
        "precompute",
        "cache",
        "recipe",
        "plan",
        "train",
        "cluster",
    ),
    *("eval", "forecast", "report", "chat", "export", "serve", "bench"),
    *("diagnose", "import", "retarget"),
)

app = Verbs(
    name="fledge",
    cls=_InOrder,
    help="Train draft models for speculative decoding, and measure honestly what they gain.",
    epilog="Example: fledge demo",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        Terminal().plain(f"fledge {__version__}")
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
        cluster,
        data,
        demo,
        diagnose,
        doctor,
        eval,
        export,
        forecast,
        import_draft,
        plan,
        precompute,
        recipe,
        regenerate,
        report,
        retarget,
        serve,
        serve_target,
        train,
    )

    app.add_typer(bench.app, name="bench")
    app.add_typer(cache.app, name="cache")
    app.command(name="chat", epilog=chat.EXAMPLE)(chat.chat)
    app.add_typer(cluster.app, name="cluster")
    app.add_typer(data.app, name="data")
    app.command(name="demo", epilog=demo.EXAMPLE)(demo.demo)
    app.command(name="diagnose", epilog=diagnose.EXAMPLE)(diagnose.diagnose)
    app.command(name="doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
    app.command(name="eval", epilog=eval.EXAMPLE)(eval.evaluate)
    app.command(name="export", epilog=export.EXAMPLE)(export.export)
    app.command(name="forecast", epilog=forecast.EXAMPLE)(forecast.forecast)
    app.command(name="import", epilog=import_draft.EXAMPLE)(import_draft.import_draft)
    app.command(name="plan", epilog=plan.EXAMPLE)(plan.plan)
    app.command(name="precompute", epilog=precompute.EXAMPLE)(precompute.precompute)
    app.add_typer(recipe.app, name="recipe")
    app.command(name="regenerate", epilog=regenerate.EXAMPLE)(regenerate.regenerate)
    app.command(name="report", epilog=report.EXAMPLE)(report.report)
    app.command(name="retarget", epilog=retarget.EXAMPLE)(retarget.retarget)
    app.command(name="serve-target", epilog=serve_target.EXAMPLE)(serve_target.serve_target)
    app.command(name="serve", epilog=serve.EXAMPLE)(serve.serve)
    app.command(name="train", epilog=train.EXAMPLE)(train.train)


_attach_verbs()


# What is not lost when a verb is interrupted; `fledge train` says it itself.
_KEPT = {
    "cache convert": "; what is converted stays, --resume continues",
    "data prepare": "; the parts that are done stay, the same command goes on",
    "diagnose": "; the target's answers stay, the same command goes on",
    "eval": "; the target's answers stay, the same command goes on",
    "precompute": "; what is written stays, --resume continues",
    "regenerate": "; the answers stay, the same command goes on",
    "retarget": "; once the refit is written, `fledge train` on the recipe.yaml beside it goes on",
}


def run(argv: list[str] | None = None) -> None:
    """Entry point: bad input is one line and exit code 2, a full disk 3, an interrupt 130, SIGTERM
    143."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (to the end)
    _show_what_libraries_say()
    with _signals() as stopped:
        try:
            code = app(args=argv, prog_name="fledge", standalone_mode=False)
            if code == 130:  # Typer turns an interrupt into this code without a word
                raise KeyboardInterrupt
            sys.stdout.flush()  # a full disk or a closed pipe shows here, not at exit
        except _UsageError as error:
            text = error.format_message()  # type: ignore[attr-defined]  # see _UsageError
            if type(error).__name__ == "NoArgsIsHelpError":  # the text is the page
                Terminal().plain(text)
                sys.exit(2)
            _fail(text, 2)
        except (KeyboardInterrupt, typer.Abort) as error:
            if isinstance(error.__cause__, EOFError) and not stopped:  # so Typer reads it
                _fail(f"a file ended too early ({first_line(error.__cause__)})", 2)
            _interrupted(argv, stopped)
        except BrokenPipeError:  # `fledge data preview | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the rest is not read
            sys.exit(0)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            if stopped:  # inside a library in another language, which took it for something else
                _interrupted(argv, stopped)
            explained = explain(error)
            if explained is None:
                raise
            _fail(*explained)
    sys.exit(code if isinstance(code, int) else 0)


def _show_what_libraries_say() -> None:
    """Warnings and logs quote what came from outside: a server's reply, a file's name."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    warnings.formatwarning = _visible_warning


_format_warning = warnings.formatwarning


def _visible_warning(*given: Any, **named: Any) -> str:
    return visible(_format_warning(*given, **named))


class _Stopped(KeyboardInterrupt):
    """Python ends as killed by SIGINT, whatever the exit code, when a plain KeyboardInterrupt came
    while some libraries are imported; not so with one of another type."""


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGTERM is an interrupt too: what is half-written goes, workers end. Yields what came."""
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)
        raise _Stopped

    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # a shell's `&` does not want it
                old[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for changed, handler in old.items():
            signal.signal(changed, handler)


def _interrupted(argv: list[str] | None, stopped: list[int]) -> NoReturn:
    for number in {*stopped}:  # a second signal: it is ending already
        signal.signal(number, signal.SIG_IGN)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    kept = next((text for verb, text in _KEPT.items() if words.startswith(verb)), "")
    _fail(f"interrupted{kept}", 128 + (stopped[0] if stopped else signal.SIGINT))


def _fail(text: str, code: int) -> NoReturn:
    """One line on stderr (none where help was shown instead), and the exit code."""
    line = " ".join(text.split())
    if line and not said_by_another(line, stopped=code > 128):
        errors = Terminal(stderr=True, soft_wrap=True)
        errors.print("fledge: ", style="" if code > 128 else "bold red", end="")
        errors.print(line)
    sys.exit(code)


if __name__ == "__main__":
    run()
