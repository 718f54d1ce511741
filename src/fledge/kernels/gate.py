"""Whether Triton kernels run on a tensor, decided before anything imports Triton, and their tiles.

On a CPU they never run. On a GPU, the reason for not using a kernel is logged once, because the
torch path that runs instead is much slower. `FLEDGE_TRITON=0` disables the kernels.
"""

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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


# --- tiles of attention ---------------------------------------------------------------------------

GRANULE = 32  # every key block is a multiple of this many keys
SMALLEST_SHARED_MEMORY = 99 << 10  # bytes per program; GPUs with less use the torch path
LARGE_SHARED_MEMORY = 163 << 10


@dataclass(frozen=True)
class Tile:
    pairs: int  # (row, head) pairs
    keys: int
    warps: int
    stages: int


# By padded head dim.
TILES: dict[str, dict[int, Tile]] = {
    "attend": {64: Tile(128, 64, 4, 3), 128: Tile(128, 64, 8, 3), 256: Tile(64, 64, 8, 2)},
    "query_grad": {64: Tile(128, 64, 8, 2), 128: Tile(128, 64, 8, 2), 256: Tile(64, 32, 8, 2)},
    "key_grad": {64: Tile(64, 128, 8, 2), 128: Tile(64, 64, 4, 3), 256: Tile(32, 64, 8, 1)},
}
SMALL_TILES: dict[str, dict[int, Tile]] = {
    "attend": {256: Tile(64, 64, 8, 1)},
    "query_grad": {256: Tile(64, 32, 8, 1)},
    "key_grad": {128: Tile(64, 64, 8, 2), 256: Tile(32, 32, 8, 1)},
}
TILES_FP32 = {64: Tile(32, 32, 8, 1), 128: Tile(32, 32, 8, 1), 256: Tile(16, 32, 8, 1)}


@cache
def shared_memory(device: torch.device) -> int:
    """What one program may use, in bytes; kernels interpreted on a CPU have no limit."""
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    properties = torch.cuda.get_device_properties(device)
    field = "shared_memory_per_block" + ("" if torch.version.hip else "_optin")
    return int(getattr(properties, field))


def tile_for(kernel: str, channels: int, dtype: torch.dtype, device: torch.device) -> Tile:
    width = max(64, 1 << (channels - 1).bit_length())
    if dtype == torch.float32:
        return TILES_FP32[width]
    small = shared_memory(device) < LARGE_SHARED_MEMORY
    return (small and SMALL_TILES[kernel].get(width)) or TILES[kernel][width]
