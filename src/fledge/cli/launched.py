"""Error reporting of a process that was launched by torchrun.

All ranks read the same recipe and reject it with the same message, so only the first rank of each
machine prints it on the terminal. Every rank writes it to torchrun's error file, which torchrun
shows rank by rank, so the failure of a single rank is not lost.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for every process that it starts
_FIRST_RANK_WAIT_S = 10.0


def said_by_another(line: str, *, stopped: bool) -> bool:
    """Write the reason to torchrun's error file. True if another process of this machine prints it.

    torchrun stops all processes when one has ended, so the others wait for the first to print.
    """
    name = os.environ.get(_ERROR_FILE)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not name:
        return False
    if stopped:
        return not first
    extra = {
        "py_callstack": line,
        "timestamp": str(int(time.time())),
    }  # torchrun shows the call stack
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    except OSError:
        return False
    if not first:
        _wait_for_first_rank()
    return not first


class _StoppedError(Exception):
    pass


def _wait_for_first_rank() -> None:
    """Wait until torchrun stops this process because the first one has ended. The process then
    exits with its own code, because torchrun may show it as the root cause."""

    def stop(*_: object) -> None:
        raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(_StoppedError):
        time.sleep(_FIRST_RANK_WAIT_S)
