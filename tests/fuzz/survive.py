"""The property: any input is accepted or refused in one line, quickly and with little memory, and a
refusal leaves all files unchanged.

A `Case` is a directory with valid files, and a way to corrupt and read them. It reads with the
functions that the commands call.
"""

import contextlib
import os
import resource
import shutil
import time
from pathlib import Path

from fledge.core.errors import BadInput

SECONDS = 10.0  # limit for one example
GROWTH = 1 << 30  # limit in bytes for all examples of a process together
_AT_ONCE = 3 << 30  # allocation limit of an example: it fails before the machine does


class Case:
    """`spoil` corrupts a file below `place`, `read` reads them, `restore` restores them."""

    examples = 150  # in CI
    spoiled = ()  # files, and what corrupts their bytes (`mutate`)

    def __init__(self, root):
        self.root = Path(root)
        self.place = self.root / "place"
        self.place.mkdir(parents=True)
        self.build()
        shutil.copytree(self.place, self.root / "valid", symlinks=True)

    def build(self):
        """Write valid files to `place`."""
        raise NotImplementedError

    def spoil(self, rng):
        name, change = rng.choice(self.spoiled)
        path = self.place / name
        path.write_bytes(change(path.read_bytes(), rng))

    def read(self):
        raise NotImplementedError

    def restore(self):
        shutil.rmtree(self.place)
        shutil.copytree(self.root / "valid", self.place, symlinks=True)


def files_below(place):
    """Sizes and modification times of all files below a directory."""
    return {
        str(path.relative_to(place)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in sorted(Path(place).rglob("*"))
    }


@contextlib.contextmanager
def bounded_memory():
    """Let an absurd allocation fail in this process instead of exhausting the machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGESIZE") + _AT_ONCE, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def survives(case, rng):
    """`taken` or `refused`: what became of one example; raises when it does not survive."""
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
    return outcome


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
