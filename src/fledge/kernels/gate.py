"""Whether Triton kernels run on a tensor, decided before anything imports Triton.

On a CPU they never do. On a GPU, a refusal is logged once, because the torch path that runs
instead is much slower. `FLEDGE_TRITON=0` switches the kernels off.
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


def kernel_runs(x: Tensor, *, what: str) -> bool:
    """`triton_runs` for kernels that only require fp32 sums to be wide enough."""
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    reason = None if narrow else f"{x.dtype} is wider than the kernel's fp32"
    return triton_runs(x, what=what, unsupported=reason)


def on_device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Launch where the tensor lives; interpreted kernels live on the CPU."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
