"""`fledge doctor`: versions and devices, what can run here, and how to add the rest.

Read-only: no network, no download, nothing written. A broken part (a torch that does not import, a
driver that does not respond) is reported, not raised.
"""

import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fledge.cli.console import facts_table, out, plain_table, print_json
from fledge.core.errors import first_line
from fledge.core.files import cache_dir
from fledge.core.install import (
    fledge_command,
    install_extra,
    install_packages,
    installed_as,
    version_of,
)
from fledge.core.machine import cpu_cores, memory_bytes
from fledge.core.terminal import marked

if TYPE_CHECKING:
    from fledge.models.embedded import Embedded

EXAMPLE = "Example: fledge doctor --json > machine.json"

_PACKAGES = (
    *("fledge", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"),
    *("datasets", "pydantic", "typer", "rich", "huggingface_hub", "gguf", "accelerate"),
)
# Parts that need only packages: the extra that brings them ("": they are installed by name).
_BY_PACKAGE = {
    "vLLM targets": ("vllm", ("vllm",)),
    "SGLang targets": ("sglang", ("sglang",)),
    "llama.cpp": ("llama-cpp", ("xllamacpp",)),
    "clusters (Ray)": ("cluster", ("ray",)),
    "serve-target": ("serve", ("uvicorn", "httptools")),
    "tensorboard": ("track", ("tensorboard",)),
    "wandb": ("track", ("wandb",)),
    "plots": ("plot", ("matplotlib",)),
    "data sets by id": ("", ("datasets",)),
    "GGUF targets": ("", ("gguf", "accelerate")),
}


@dataclass(frozen=True)
class Ability:
    """An optional feature: whether it works here, and if not, why and what to do."""

    name: str
    works: bool
    note: str
    install: str = ""  # the command that installs it, if one does


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Accelerator:
    """What torch reports about this machine, or the problem that keeps it from reporting."""

    problem: str = ""
    build: str = ""  # "CUDA 12.8" or "CPU only"
    gpus: tuple[Gpu, ...] = ()


def doctor(
    as_json: Annotated[bool, Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Print versions, devices and disks, and which optional parts can run here."""
    accelerator = look_at_torch()
    facts = {
        "versions": {"python": platform.python_version()} | {p: version_of(p) for p in _PACKAGES},
        "python": sys.executable,
        "command": fledge_command(),
        "platform": platform.platform(),
        "devices": {
            "cpu_cores": cpu_cores(),
            "memory_bytes": memory_bytes(),
            "torch_build": accelerator.build or accelerator.problem,
            "gpus": [asdict(gpu) for gpu in accelerator.gpus],
        },
        "disk": {"cache": _disk(cache_dir()), "working_directory": _disk(Path.cwd())},
        "parts": [asdict(part) for part in optional_parts(accelerator)],
    }
    if as_json:
        print_json(facts)
    else:
        _print_tables(facts)


def look_at_torch() -> Accelerator:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        return Accelerator(problem=f"torch does not import ({first_line(error)})")
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    try:
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a driver that is too old, a GPU that fell off the bus
        return Accelerator(problem=f"the GPU does not answer ({error})", build=build)
    gpus = tuple(Gpu(card.name, card.total_memory, (card.major, card.minor)) for card in cards)
    return Accelerator("", build, gpus)


def optional_parts(accelerator: Accelerator) -> list[Ability]:
    from fledge.models.embedded import MODELS

    compiler = next((cc for cc in ("c++", "g++", "clang++") if shutil.which(cc)), None)
    no_compiler = "no C++ compiler on the path; install g++, or leave compile: false"
    return [
        _gpu_training(accelerator),
        _precision(accelerator, "bf16 compute", (8, 0), "Ampere"),
        _precision(accelerator, "fp8 targets", (8, 9), "Ada or Hopper"),
        Ability("torch.compile", compiler is not None, compiler or no_compiler),
        *(_by_package(name, extra, packages) for name, (extra, packages) in _BY_PACKAGE.items()),
        *(_embedded(name, model) for name, model in MODELS.items()),
    ]


def _gpu_training(accelerator: Accelerator) -> Ability:
    if gpus := accelerator.gpus:
        return Ability("GPU training", True, f"{len(gpus)} x {gpus[0].name}")
    no_gpu = "no GPU is visible; check the driver (nvidia-smi) and the build of torch"
    return Ability("GPU training", False, accelerator.problem or f"{no_gpu}; the CPU works, slowly")


def _precision(
    accelerator: Accelerator, name: str, needed: tuple[int, int], family: str
) -> Ability:
    if not accelerator.gpus:
        return Ability(name, False, "needs a GPU; CPUs compute in float32")
    weakest = min(gpu.capability for gpu in accelerator.gpus)
    note = f"compute capability {'.'.join(map(str, weakest))}"
    if weakest >= needed:
        return Ability(name, True, note)
    return Ability(name, False, f"{note}: needs {family}; float32 is used")


def _by_package(name: str, extra: str, packages: tuple[str, ...]) -> Ability:
    versions = {package: installed_as(package) for package in packages}
    if missing := [package for package, version in versions.items() if version is None]:
        how = install_extra(extra) if extra else install_packages(*missing)
        return Ability(name, False, f"{', '.join(missing)} not installed", how)
    return Ability(name, True, ", ".join(filter(None, versions.values())))


def _embedded(name: str, model: "Embedded") -> Ability:
    if model.directory.is_dir():
        return Ability(f"embedded {name}", True, "in the cache, works offline")
    note = f"first use downloads {model.megabytes} MB with pip"
    return Ability(f"embedded {name}", True, note)


def _disk(path: Path) -> dict[str, Any]:
    """Free bytes on the disk where `path` is or would be created."""
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    return {"path": str(path), "free_bytes": shutil.disk_usage(existing).free}


def _print_tables(facts: dict[str, Any]) -> None:
    devices, memory = facts["devices"], facts["devices"]["memory_bytes"]
    size = f", {memory / 2**30:.0f} GiB memory" if memory else ""
    rows = {
        "versions": ", ".join(f"{name} {v or '-'}" for name, v in facts["versions"].items()),
        "python": f"{facts['python']} on {facts['platform']}",
        "command": f"{facts['command']} (how to call this fledge from here)",
        "cpu": f"{devices['cpu_cores']} cores{size}",
        "torch": devices["torch_build"],
    }
    for index, gpu in enumerate(devices["gpus"]):
        rows[f"gpu {index}"] = f"{gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"
    for name, disk in facts["disk"].items():
        rows[name] = f"{disk['path']}, {disk['free_bytes'] / 1e9:.0f} GB free"
    out.print(facts_table(rows))
    parts = plain_table("part", "here", "how, or what to do", words=3, title="\nWhat can run here")
    installs: dict[str, list[str]] = {}  # command: the parts that it adds
    for part in facts["parts"]:
        works = marked("[green]yes[/]" if part["works"] else "[yellow]no[/]")
        parts.add_row(part["name"], works, part["note"])
        if part["install"]:
            installs.setdefault(part["install"], []).append(part["name"])
    out.print(parts)
    if installs:
        out.print("\nTo add what is missing", style="italic")
    for command, names in installs.items():  # unbroken, however narrow the terminal
        out.say(f"  {command}  # {', '.join(names)}")
