"""The `fledge` command: one file per verb, errors in one line.

Neither this file nor a verb's module level imports torch, so that `--help` is fast.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import FrameType
from typing import Any, NoReturn

# Set before torch is loaded: idle CPU threads sleep instead of spinning. On a busy machine,
# spinning threads halve the speed of every process, this one included.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# When another rank dies, torch warns with C++ stack traces; fledge reports it in one line.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import typer

from fledge import __version__
from fledge.cli.help import VerbGroup, Verbs
from fledge.core.errors import explain, first_line
from fledge.core.terminal import Terminal, VisibleFormatter, visible

# Typer vendors click (older versions import it), so UsageError is found through a public subclass.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


# The verbs in workflow order, which is the order of the help page, and where each is defined.
_VERBS = {
    "demo": "demo.demo", "doctor": "doctor.doctor", "data": "data.app",
    "regenerate": "regenerate.regenerate", "serve-target": "serve_target.serve_target",
    "precompute": "cache.precompute", "cache": "cache.app", "recipe": "recipe.app",
    "plan": "plan.plan", "train": "train.train", "race": "race.race", "cluster": "cluster.app",
    "eval": "eval.evaluate", "forecast": "forecast.forecast", "report": "report.report",
    "chat": "chat.chat", "export": "export.export", "serve": "serve.serve", "bench": "bench.app",
    "diagnose": "diagnose.diagnose", "import": "import_draft.import_draft",
    "retarget": "retarget.retarget", "stitch": "stitch.stitch",
}  # fmt: skip


class _OrderedGroup(VerbGroup):
    """Lists verbs in workflow order; Typer would list groups after plain verbs."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_VERBS)


app = Verbs(
    name="fledge",
    cls=_OrderedGroup,
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
    """Holds the global options; the verbs are attached below."""


for _name, _place in _VERBS.items():
    _file, _, _attribute = _place.partition(".")
    _module = import_module(f"fledge.cli.{_file}")
    if isinstance(_verb := getattr(_module, _attribute), typer.Typer):
        app.add_typer(_verb, name=_name)
    else:
        app.command(name=_name, epilog=_module.EXAMPLE)(_verb)


# What survives an interrupt, by verb; `fledge train` reports it itself.
_KEPT = {
    "cache convert": "; converted shards are kept, --resume continues",
    "data prepare": "; finished parts are kept, the same command continues",
    "diagnose": "; the target's answers are kept, the same command continues",
    "eval": "; the target's answers are kept, the same command continues",
    "precompute": "; written shards are kept, --resume continues",
    "regenerate": "; the answers are kept, the same command continues",
}


def run(argv: list[str] | None = None) -> None:
    """Entry point. Bad input is reported in one line with exit code 2; a full disk exits with 3, an
    interrupt with 130, SIGTERM with 143."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open until exit)
    _escape_library_output()
    with _catch_signals() as stopped:
        try:
            code = app(args=argv, prog_name="fledge", standalone_mode=False)
            if code == 130:  # Typer silently turns an interrupt into this code
                raise KeyboardInterrupt
            sys.stdout.flush()  # a full disk or a closed pipe fails here, not at exit
        except _UsageError as error:
            text = error.format_message()  # type: ignore[attr-defined]  # see _UsageError
            if type(error).__name__ == "NoArgsIsHelpError":  # the text is the help page
                Terminal().plain(text)
                sys.exit(2)
            _fail(text, 2)
        except (KeyboardInterrupt, typer.Abort) as error:
            if isinstance(error.__cause__, EOFError) and not stopped:  # Typer raises Abort
                _fail(f"a file ended too early ({first_line(error.__cause__)})", 2)
            _fail_interrupted(argv, stopped)
        except BrokenPipeError:  # `fledge data preview | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest
            sys.exit(0)
        except (ValueError, OSError, MemoryError, RuntimeError) as error:
            if stopped:  # a native library reported the signal as another error
                _fail_interrupted(argv, stopped)
            explained = explain(error)
            if explained is None:
                raise
            _fail(*explained)
    sys.exit(code if isinstance(code, int) else 0)


def _escape_library_output() -> None:
    """Escape control characters in warnings and logs: they quote outside text such as a server's
    reply or a file's name."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())
    warnings.formatwarning = lambda *args, **named: visible(_format_warning(*args, **named))


_format_warning = warnings.formatwarning


class _Stopped(KeyboardInterrupt):
    """A type of our own: after a plain KeyboardInterrupt during the import of some libraries Python
    ends as if killed by SIGINT, whatever the exit code."""


@contextlib.contextmanager
def _catch_signals() -> Iterator[list[int]]:
    """Treat SIGTERM as an interrupt too, so that partial files are removed and workers end. Yields
    the list of received signals."""
    stopped: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        stopped.append(number)
        raise _Stopped

    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # ignored in a background job
                old[number] = signal.signal(number, stop)
    try:
        yield stopped
    finally:
        for handled, handler in old.items():
            signal.signal(handled, handler)


def _fail_interrupted(argv: list[str] | None, stopped: list[int]) -> NoReturn:
    for number in {*stopped}:  # ignore repeats: the process is already ending
        signal.signal(number, signal.SIG_IGN)
    command = " ".join(sys.argv[1:] if argv is None else argv)
    kept = next((text for verb, text in _KEPT.items() if command.startswith(verb)), "")
    _fail(f"interrupted{kept}", 128 + (stopped[0] if stopped else signal.SIGINT))


def _fail(text: str, code: int) -> NoReturn:
    """Print one line on stderr (none if help was shown instead) and exit with the code. Under
    torchrun every rank prints its own: one of them may have failed alone."""
    if line := " ".join(text.split()):
        errors = Terminal(stderr=True, soft_wrap=True)
        errors.print("fledge: ", style="" if code > 128 else "bold red", end="")
        errors.print(line)
    sys.exit(code)


if __name__ == "__main__":
    run()
