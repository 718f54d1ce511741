"""Whether Triton kernels run on a tensor, decided before anything imports Triton.

On a CPU they never do. On a GPU, the reason for not using a kernel is logged once, because the
torch path that runs instead is much slower. `FLEDGE_TRITON=0` disables the kernels.
"""

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@cache
def _missing() -> str | None:
    """Why Triton is not available; None if it is."""
    if os.environ.get("FLEDGE_TRITON", "1") == "0":
        return "FLEDGE_TRITON=0"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


@cache
def _warn_once(what: str, reason: str) -> None:
    log.warning("%s: the torch path runs instead of the GPU kernel (%s)", what, reason)


def triton_runs(x: Tensor, *, what: str, unsupported: str | None = None) -> bool:
    """Whether to use the kernel for `what`; `unsupported` is why it does not support the inputs."""
    if not x.is_cuda:
        return False
    reason = _missing() or unsupported
    if reason is not None:
        _warn_once(what, reason)
    return reason is None


def kernel_runs(x: Tensor, *, what: str) -> bool:
    """`triton_runs` for kernels whose only requirement is that fp32 sums are wide enough."""
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    reason = None if narrow else f"{x.dtype} is wider than the kernel's fp32"
    return triton_runs(x, what=what, unsupported=reason)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """A context that launches kernels on the device of x; interpreted kernels run on the CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
