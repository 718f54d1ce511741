"""The property: whatever is read, it is taken or refused in one line, soon, with little memory,
and a refusal leaves everything as it was.

A `Case` is a place with something valid in it, and a way to spoil and read that. It reads with the
functions that the verbs call.
"""

import contextlib
import os
import resource
import shutil
import time
from pathlib import Path

from fledge.core.errors import BadInput

SECONDS = 10.0  # that one example may take
GROWTH = 1 << 30  # bytes that all examples of a process together may add
_AT_ONCE = 3 << 30  # that an example may ask for at all: beyond, it fails instead of the machine


class Case:
    """`spoil` changes files below `root`, `read` reads them; `restore` puts them back."""

    examples = 60  # in CI

    def __init__(self, root):
        self.root = Path(root)
        self.place = self.root / "place"
        self.place.mkdir(parents=True)
        self.build()
        shutil.copytree(self.place, self.root / "valid", symlinks=True)

    def build(self):
        """Put something valid into `place`."""
        raise NotImplementedError

    def spoil(self, rng):
        raise NotImplementedError

    def read(self):
        raise NotImplementedError

    def restore(self):
        shutil.rmtree(self.place)
        shutil.copytree(self.root / "valid", self.place, symlinks=True)


def files_below(place):
    """Everything that writing would change."""
    return {
        str(path.relative_to(place)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(Path(place).rglob("*"))
    }


@contextlib.contextmanager
def bounded_memory():
    """An absurd allocation is an error of this process, not the end of the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + _AT_ONCE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(case, rng):
    """(taken or refused, seconds) of one example; an AssertionError, or what came instead."""
    case.restore()
    case.spoil(rng)
    before = files_below(case.place)
    begin = time.perf_counter()
    try:
        with bounded_memory():
            case.read()
        outcome = "taken"
    except BadInput as refusal:
        outcome = "refused"
        line = str(refusal)
        assert len(line.splitlines()) == 1, f"not one line: {line!r}"
        assert len(line) < 1200, f"a line of {len(line)} characters: {line}"
        assert files_below(case.place) == before, "something was written"
    seconds = time.perf_counter() - begin
    assert seconds < SECONDS, f"{seconds:.1f} s"
    return outcome, seconds


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
