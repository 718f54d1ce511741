"""Under torchrun: what a process of several says when it gives up.

All of them read the same recipe and refuse it in the same words, so the first of each machine says
it on the terminal. All write it where torchrun looks for the reason, which it shows rank by rank: a
failure of one rank alone is not lost.
"""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun for every process that it starts
_FIRST_SPEAKS_S = 10.0


def said_by_another(line: str, *, stopped: bool) -> bool:
    """Leave the reason for torchrun. True: another process of this machine says it on the terminal.

    torchrun stops all processes when one has ended: the others let the first one speak.
    """
    name = os.environ.get(_ERROR_FILE)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not name:
        return False
    if stopped:
        return not first
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}  # the former is shown
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    except OSError:
        return False
    if not first:
        _wait_for_the_first()
    return not first


class _StoppedError(Exception):
    pass


def _wait_for_the_first() -> None:
    """Until torchrun stops this process, because the first one has ended. It then ends by itself,
    with its own exit code: torchrun may show it as the root cause."""

    def stop(*_: object) -> None:
        raise _StoppedError

    signal.signal(signal.SIGTERM, stop)
    with contextlib.suppress(_StoppedError):
        time.sleep(_FIRST_SPEAKS_S)
