"""`target.backend=vllm`: the target inside vLLM. Imports no torch when loaded."""

from typing import Any, Literal

from pydantic import Field

from fledge.core.settings import PositiveShare
from fledge.target.kinds import EngineKind, EngineTarget


class VllmTarget(EngineTarget):
    """The target inside vLLM, in this process (extra: vllm)."""

    backend: Literal["vllm"] = "vllm"
    """vLLM's hidden-state extraction computes the states: the numbers that vLLM will serve."""

    memory_fraction: PositiveShare | None = None
    """Share of GPU memory for the engine (gpu_memory_utilization); null: the engine's choice."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments by their own names, for example enforce_eager, max_model_len."""


class VllmKind(EngineKind[VllmTarget]):
    name = "vllm"
    section = VllmTarget
    backend = "fledge.target.vllm.runner:VLLMEagle3TargetModel"
    argument_names = ("tensor_parallel_size", "gpu_memory_utilization")


VLLM = VllmKind()
