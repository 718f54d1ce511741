"""Directories that are created once in the cache and then only read.

One process creates a directory while the others wait; it appears complete or not at all, and a
damaged one is created again. Not for hub snapshots, whose library has its own rules.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from fledge.core.errors import BadInput
from fledge.core.files import atomic_directory, cache_dir, write_json
from fledge.core.reading import MapOf, Table, Whole, read_json
from fledge.core.terminal import Terminal

RECORD = "fledge_source.json"  # where the directory came from, and the size of every file
_RECORD_FIELDS = Table(optional={"bytes": MapOf(Whole())})


def models_root() -> Path:
    return cache_dir() / "models"


def stored(name: str, make: Callable[[Path], None], *, source: dict[str, str]) -> Path:
    """The directory `name` in the model cache; `make` fills it if it does not exist yet."""
    path = models_root() / name
    if is_whole(path):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.parent / f"{name}.lock"):
            if not is_whole(path):  # another process may have created it while this one waited
                _remove_leftovers(path)
                with atomic_directory(path) as directory:
                    make(directory)
                    _write_record(directory, source)
    except OSError as error:
        raise BadInput(
            f"cannot write the model cache ({error.strerror or error})",
            where=str(path.parent),
            fix="free some space, or point FLEDGE_CACHE to a directory that you may write",
        ) from error
    return path


def need_free(n_bytes: int, *, what: str) -> None:
    """Refuse work that needs more disk space than is free."""
    root = models_root()
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    if free < n_bytes:
        raise BadInput(
            f"{what} needs {n_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free",
            where=str(root),
            fix="free some space, or point FLEDGE_CACHE to another disk",
        )


def record_of(path: Path) -> dict[str, Any] | None:
    """The record that `stored` wrote for a directory, or None if it is missing or unreadable."""
    try:
        record: dict[str, Any] = read_json(path / RECORD, _RECORD_FIELDS)
    except BadInput:
        return None
    return record


def is_whole(path: Path) -> bool:
    """Whether the directory exists with every file that it was created with."""
    record = record_of(path)
    if record is None or "bytes" not in record:
        return False
    files = ((path / name, size) for name, size in record["bytes"].items())
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


def _write_record(directory: Path, source: dict[str, str]) -> None:
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(directory)): file.stat().st_size for file in files}
    write_json(directory / RECORD, {**source, "bytes": sizes})


def _remove_leftovers(path: Path) -> None:
    """Remove leftovers of a killed process; the lock excludes other writers."""
    for pattern in (f".{path.name}.*.tmp", f".{path.name}.*.old", f".{path.name}.download.*"):
        for leftover in path.parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


# --- progress ------------------------------------------------------------------------------------


@contextlib.contextmanager
def phase(text: str) -> Iterator[Callable[[str], None]]:
    """One line on stderr during work that is done only once: a spinner on a terminal, elsewhere
    a plain line, repeated at intervals. Yields a function that updates the progress shown."""
    # The stream is fixed here, because sys.stderr may be silenced inside to hide a library's bars.
    terminal = Terminal(file=sys.stderr, soft_wrap=True)
    if not terminal.is_terminal:
        terminal.say(f"{text} ...")
    with terminal.waiting(text) as tell:
        yield tell


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
