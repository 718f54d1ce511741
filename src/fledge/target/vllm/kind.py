"""`target.backend=vllm`: the target inside vLLM. Imports no torch when loaded."""

from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator, model_validator

from fledge.core.settings import Positive, Text
from fledge.target.kinds import EngineKind, EngineTarget

if TYPE_CHECKING:
    import torch


class VllmTarget(EngineTarget):
    """The target inside vLLM, in this process (extra: vllm) or behind a running `vllm serve`."""

    backend: Literal["vllm"] = "vllm"
    """vLLM's hidden-state extraction computes the states: the numbers that vLLM will serve."""

    url: Text | None = None
    """Address of a `vllm serve` with the connector, started by others; null: vLLM starts here."""

    shared_dir: Text | None = None
    """Directory of the connector's files: shared with `url`'s server; null: one in memory."""

    token_env: Text | None = None
    """With url: name of the environment variable that holds the API key; null: none is sent."""

    timeout_s: Positive = 120.0
    """With url: how long one row may take, and how long to wait while the server is away."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError(f"'{url}' must start with http:// or https://")
        return url

    @model_validator(mode="after")
    def _check_engine(self) -> "VllmTarget":
        if self.url is None:
            return self
        if self.shared_dir is None:
            raise ValueError("url needs shared_dir, the directory that its server writes states to")
        if self.tp_size > 1 or self.memory_fraction is not None or self.engine_args:
            raise ValueError(
                "tp_size, memory_fraction and engine_args are for a vLLM that starts here: leave "
                "them, or url, out"
            )
        return self


class VllmKind(EngineKind[VllmTarget]):
    name = "vllm"
    section = VllmTarget
    backend = "fledge.target.vllm.runner:VLLMEagle3TargetModel"
    argument_names = ("tensor_parallel_size", "gpu_memory_utilization")

    def own_arguments(self, section: VllmTarget, device: "torch.device") -> dict[str, Any]:
        arguments: dict[str, Any] = {"shared_dir": section.shared_dir, "device": device}
        if section.url is None:
            return arguments
        from fledge.target.remote.client import token_from

        token = token_from(section.token_env)
        return {**arguments, "url": section.url, "token": token, "timeout_s": section.timeout_s}


VLLM = VllmKind()
