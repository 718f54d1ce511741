"""The hardware of a run: its device, and a description that accompanies its figures.

The description contains nothing personal: no user, host or path.
"""

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fledge.core.errors import BadInput
from fledge.core.install import version_of

if TYPE_CHECKING:
    import torch

MACHINE_NAME = "machine.json"  # in a run's directory
_PACKAGES = ("fledge", "torch", "transformers", "safetensors", "numpy")


def is_main_rank() -> bool:
    """Whether this is the first process; works before the process group exists."""
    return os.environ.get("RANK", "0") == "0"


def find_device(wanted: "torch.device | str | None" = None) -> "torch.device":
    """The device of that name, refused if unavailable; None: a GPU if any, else the CPU."""
    import torch

    if not wanted:
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise BadInput(f"'{wanted}' is not a device", fix="cpu, cuda or cuda:1") from None
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device.type != "cpu":
        usable = accelerator is not None and accelerator.type == device.type
        count = torch.accelerator.device_count() if usable else 0
        if (device.index or 0) >= count:
            what = f"{wanted} was asked for, but torch sees {count or 'no'} GPU"
            raise BadInput(what, fix="use cpu or another one")
    return device


def describe_machine() -> dict[str, Any]:
    """CPU, GPUs, memory and package versions."""
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cpu_cores": cpu_cores(),
        "memory_bytes": memory_bytes(),
        "gpus": [{"name": gpu.name, "memory_bytes": gpu.total_memory} for gpu in gpus],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"python": platform.python_version()}
        | {name: version for name in _PACKAGES if (version := version_of(name))},
    }


def cpu_cores() -> int:
    """Cores this process may use: in a container, possibly fewer than the machine has."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not supported by this system
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def multiplies_bfloat16(device: "torch.device | None" = None) -> bool:
    """Whether the device (default: the CPU) has bfloat16 matrix instructions: with them bfloat16 is
    at least twice as fast as float32, without them it is slower."""
    import torch

    if device is not None and device.type == "cuda":
        return bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
