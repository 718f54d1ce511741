"""May Triton kernels run on this tensor? Asked before anything imports Triton.

On a CPU the answer is always no, and nothing is said. On a GPU a no is worth one line in the log,
because the torch path that runs instead is much slower. `FLEDGE_TRITON=0` switches the kernels off.
"""

import importlib.util
import logging
import os
from functools import cache

from torch import Tensor

log = logging.getLogger(__name__)


@cache
def _missing() -> str | None:
    if os.environ.get("FLEDGE_TRITON", "1") == "0":
        return "FLEDGE_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@cache
def _say_once(what: str, reason: str) -> None:
    log.warning("%s: the torch path runs instead of the GPU kernel (%s)", what, reason)


def triton_runs(x: Tensor, *, what: str, unsupported: str | None = None) -> bool:
    """Whether to take the kernel for `what`; `unsupported` is why these inputs cannot."""
    if not x.is_cuda:
        return False
    reason = _missing() or unsupported
    if reason is not None:
        _say_once(what, reason)
    return reason is None
