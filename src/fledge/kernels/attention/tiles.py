"""How much one program of an attention kernel handles, by kernel, head dim and GPU.

A tile that does not fit a GPU's shared memory is an error at launch. `TILES` were tuned on an H200,
and fit the other GPUs of data centres (A100, B200: 163 KiB and more). The rest (A10, L40S, RTX
3090 to 5090) have 99 KiB and use `SMALL_TILES` where those are too large. What fits is checked
without such GPUs, by compiling for them: `benchmarks/compile_kernels.py`.
"""

from dataclasses import dataclass
from functools import cache

import torch

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
