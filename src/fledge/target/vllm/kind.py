"""`target.backend=vllm`: the target inside vLLM. Imports no torch when loaded."""

from typing import Literal

from fledge.target.kinds import EngineKind, EngineTarget


class VllmTarget(EngineTarget):
    """The target inside vLLM, in this process (extra: vllm)."""

    backend: Literal["vllm"] = "vllm"
    """vLLM's hidden-state extraction computes the states: the numbers that vLLM will serve."""


class VllmKind(EngineKind[VllmTarget]):
    name = "vllm"
    section = VllmTarget
    backend = "fledge.target.vllm.runner:VLLMEagle3TargetModel"
    argument_names = ("tensor_parallel_size", "gpu_memory_utilization")


VLLM = VllmKind()
