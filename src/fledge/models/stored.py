"""Directories that are created once in the cache and then only read.

One process creates a directory while the others wait; it appears complete or not at all. Not for
hub snapshots, whose library has its own rules.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock

from fledge.core.errors import BadInput
from fledge.core.files import atomic_directory, cache_dir, write_json
from fledge.core.terminal import Terminal


def models_root() -> Path:
    return cache_dir() / "models"


def stored(name: str, make: Callable[[Path], None], *, source: str) -> Path:
    """The directory `name` in the model cache; `make` fills it if it does not exist yet. `source`
    is noted in it for whoever looks."""
    path = models_root() / name
    if path.is_dir():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / f"{name}.lock"):
            if not path.is_dir():  # another process may have created it while this one waited
                with atomic_directory(path) as directory:
                    make(directory)
                    write_json(directory / "fledge_source.json", {"source": source})
    except OSError as error:
        raise BadInput(
            f"cannot write the model cache ({error.strerror or error})",
            where=str(path.parent),
            fix="free some space, or point FLEDGE_CACHE to a directory that you may write",
        ) from error
    return path


# --- progress ------------------------------------------------------------------------------------


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """One line on stderr during work that is done only once, with a spinner on a terminal."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    terminal = Terminal(file=sys.stderr, soft_wrap=True)
    if not terminal.is_terminal:
        terminal.say(f"{text} ...")
    with terminal.waiting(text):
        yield


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars and tables of transformers; restores its settings at the end."""
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
