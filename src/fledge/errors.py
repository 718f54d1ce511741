"""How fledge says no: one exception whose text is the one line a user reads.

Not for our own broken invariants: those are asserts.
"""


class BadInput(ValueError):  # noqa: N818  (it is a verdict on input, and reads as one)
    """Bad input: what is wrong, where, and what to do about it, in one line.

    The command line prints the line and exits with code 2; library users catch a `ValueError`.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        line = what if not where else f"{where}: {what}"
        line = line if not fix else f"{line}; {fix}"
        super().__init__(" ".join(line.split()))


class TargetUnreachable(BadInput):
    """The target is not there now, and may be later: a run that meets this can be continued."""


def broken_files() -> tuple[type[Exception], ...]:
    """What transformers and safetensors raise about files that are not what they seem to be.

    For `except` around nothing but the reading of such files: anything may come out of a broken
    configuration, a division by zero of heads included.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        OSError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError,
        RuntimeError, SafetensorError, StrictDataclassError,
    )  # fmt: skip


def first_line(error: BaseException) -> str:
    """Other libraries explain themselves over many lines: the first one is enough (with the next,
    where it only announces that one)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def nearest(name: str, valid: list[str]) -> str:
    """`did you mean 'x'?` for the valid name closest to a mistyped one, else the valid names."""
    import difflib

    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid names: {', '.join(valid)}" if valid else "nothing is accepted here"
