"""One place that opens a target inside this process: Hugging Face, SGLang or vLLM, by name.

Recipes and the target server both come here. Engines are imported by the function that needs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from fledge.core.batch import Supervision
from fledge.core.errors import BadInput, MissingPackage, nearest
from fledge.core.machine import find_device
from fledge.target.base import Eagle3TargetBackend


@dataclass(frozen=True)
class TargetOptions:
    """What a backend needs to know; an engine ignores what is not its own."""

    aux_layer_ids: Sequence[int] | None = None
    supervision: Supervision = "hidden"
    dtype: str = "auto"
    trust_remote_code: bool = False
    device: torch.device | str | None = None  # hf
    attn_implementation: str | None = None  # hf
    compile_layers: bool = True  # hf, on a GPU
    tp_size: int = 1  # engines: GPUs that the target is split over
    memory_fraction: float | None = None  # engines: share of the GPU's memory
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # engines: by their own names


def open_target(engine: str, model: str, options: TargetOptions) -> Eagle3TargetBackend:
    """The target `model`, run by `engine`."""
    if engine not in _OPENERS:
        raise BadInput(f"no engine {engine!r}", where="engine", fix=nearest(engine, [*_OPENERS]))
    return _OPENERS[engine](model, options)


def _hf(model: str, options: TargetOptions) -> Eagle3TargetBackend:
    from fledge.target.hf.model import HFEagle3TargetModel

    device = find_device(options.device)
    return HFEagle3TargetModel.from_pretrained(
        model,
        aux_layer_ids=options.aux_layer_ids,
        supervision=options.supervision,
        dtype=_auto_dtype(model, device) if options.dtype == "auto" else options.dtype,
        device=device,
        attn_implementation=options.attn_implementation,
        compile_layers=options.compile_layers,
        trust_remote_code=options.trust_remote_code,
    )


def _auto_dtype(model: str, device: torch.device) -> str:
    """As stored; but a model stored in float32 (a dequantised one) runs in bfloat16 on a GPU."""
    from fledge.models.resolve import load_config

    stored = getattr(load_config(model), "dtype", None)
    return "bfloat16" if device.type == "cuda" and stored == torch.float32 else "auto"


def _sglang(model: str, options: TargetOptions) -> Eagle3TargetBackend:
    arguments: dict[str, Any] = {}
    if options.tp_size > 1:
        arguments["tp_size"] = options.tp_size
    if options.memory_fraction is not None:
        arguments["mem_fraction_static"] = options.memory_fraction
    return _engine("sglang", "SGLangEagle3TargetModel", model, options, arguments)


def _vllm(model: str, options: TargetOptions) -> Eagle3TargetBackend:
    arguments: dict[str, Any] = {}
    if options.tp_size > 1:
        arguments["tensor_parallel_size"] = options.tp_size
    if options.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = options.memory_fraction
    return _engine("vllm", "VLLMEagle3TargetModel", model, options, arguments)


def _engine(
    engine: str, name: str, model: str, options: TargetOptions, arguments: dict[str, Any]
) -> Eagle3TargetBackend:
    """The engine's `from_pretrained`, with its own argument names; what it lacks in one line."""
    if options.trust_remote_code:
        arguments["trust_remote_code"] = True
    try:
        kind: Any = getattr(import_module(f"fledge.target.{engine}.runner"), name)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{error.name} is not installed", fix=f"pip install 'fledge[{engine}]'"
        ) from error
    backend: Eagle3TargetBackend = kind.from_pretrained(
        model,
        aux_layer_ids=options.aux_layer_ids,
        dtype=options.dtype,
        supervision=options.supervision,
        **{**arguments, **options.engine_args},
    )
    return backend


_OPENERS: dict[str, Callable[[str, TargetOptions], Eagle3TargetBackend]] = {
    "hf": _hf,
    "sglang": _sglang,
    "vllm": _vllm,
}
ENGINES = tuple(_OPENERS)
