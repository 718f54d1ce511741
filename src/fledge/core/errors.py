"""How fledge refuses input: one exception whose message is the one line that a user reads.

Failures of the machine (full disks, bad paths, lack of memory) are turned into such a line here.

Not for broken invariants of our own: those are asserts.
"""

import errno

LONGEST_LINE = 400  # characters quoted from another library's message


class BadInput(ValueError):  # noqa: N818  (it is a verdict on input, and reads as one)
    """Bad input: what is wrong, where, and how to fix it, in one line.

    The command line prints the line and exits with code 2; library users catch a `ValueError`.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        line = what if not where else f"{where}: {what}"
        line = line if not fix else f"{line}; {fix}"
        super().__init__(" ".join(line.split()))


class MissingPackage(BadInput, ImportError):  # noqa: N818  (a verdict too)
    """An optional package is not installed: bad input on the command line, and an `ImportError`
    for library users, who guard optional imports with it."""


class UntrustedCode(BadInput):
    """A model comes with its own Python code, and the user has not allowed it to run."""

    @classmethod
    def of(cls, name: str) -> "UntrustedCode":
        return cls(
            "it brings Python code of its own, which runs only if you trust it",
            where=name,
            fix="--trust-remote-code, or target.trust_remote_code=true in a recipe",
        )


class TargetUnreachable(BadInput):
    """The target cannot be reached now but may be later: the run can be continued."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """The message and exit code of a failure that is not a bug, or None to show the traceback."""
    if isinstance(error, BadInput):
        return str(error), 2
    on_gpu, on_cpu = type(error).__name__ == "OutOfMemoryError", "can't allocate memory"
    if isinstance(error, MemoryError) or on_gpu or on_cpu in str(error):
        return f"out of memory ({first_line(error)}); ask for less at a time", 2
    if type(error).__name__ == "DistBackendError" or "/gloo/" in str(error):
        lost = f"another rank is gone ({first_line(error)})"
        return f"{lost}; the same command continues the run", 2
    if not isinstance(error, OSError):
        return None
    where = str(error.filename2 or error.filename or "")
    where = where if len(where) <= 200 else f"{where[:100]}...{where[-20:]}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = f" ({where})" if where else ""
        return f"the disk is full{place}; make room and run the same command again", 3
    if not where and error.errno != errno.EIO:  # not about a path that the user named
        return None
    advice = "check the disk" if error.errno == errno.EIO else "check the path, or choose another"
    return f"{where or 'a file'}: {(error.strerror or 'failed').lower()}; {advice}", 2


def broken_files() -> tuple[type[Exception], ...]:
    """The exceptions that transformers and safetensors raise for damaged files.

    For `except` around nothing but reading such files: a broken configuration may raise anything,
    even a division by zero heads.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError,
        RuntimeError, SafetensorError, StrictDataclassError,
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """The first line of another library's message, shortened; with the second line where the first
    only announces it with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    line = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE].rstrip()} ..."


def in_words(count: int) -> str:
    """A small number as a message writes it: `three layers`."""
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[count] if count < len(words) else str(count)


def nearest(name: str, valid: list[str]) -> str:
    """`did you mean 'x'?` for the valid name closest to a mistyped one, else all valid names."""
    from difflib import SequenceMatcher

    def bare(word: str) -> str:
        return "".join(filter(str.isalnum, word.casefold()))

    def closeness(word: str) -> float:
        return SequenceMatcher(None, bare(word), bare(name)).ratio()

    closest = max(valid, key=closeness, default="")
    if closest and closeness(closest) >= 0.5:
        return f"did you mean '{closest}'?"
    return f"valid names: {', '.join(valid)}" if valid else "nothing is accepted here"
