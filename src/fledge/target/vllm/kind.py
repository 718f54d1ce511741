"""`target.backend=vllm`: the target inside vLLM. Imports no torch when loaded."""

from typing import TYPE_CHECKING, Any, Literal

from fledge.core.settings import Text
from fledge.target.kinds import EngineKind, EngineTarget

if TYPE_CHECKING:
    import torch


class VllmTarget(EngineTarget):
    """The target inside vLLM, in this process (extra: vllm)."""

    backend: Literal["vllm"] = "vllm"
    """vLLM's hidden-state extraction computes the states: the numbers that vLLM will serve."""

    shared_dir: Text | None = None
    """Directory of the files that carry the states; null: one in memory."""


class VllmKind(EngineKind[VllmTarget]):
    name = "vllm"
    section = VllmTarget
    backend = "fledge.target.vllm.runner:VLLMEagle3TargetModel"
    argument_names = ("tensor_parallel_size", "gpu_memory_utilization")

    def own_arguments(self, section: VllmTarget, device: "torch.device") -> dict[str, Any]:
        return {"shared_dir": section.shared_dir, "device": device}


VLLM = VllmKind()
