"""`target.backend=sglang`: the target inside SGLang. Imports no torch when loaded."""

from typing import Any, Literal

from pydantic import Field

from fledge.core.settings import PositiveShare
from fledge.target.kinds import EngineKind, EngineTarget


class SglangTarget(EngineTarget):
    """The target inside SGLang, in this process (extra: sglang)."""

    backend: Literal["sglang"] = "sglang"
    """SGLang's ModelRunner computes the states: the numbers that SGLang will serve."""

    memory_fraction: PositiveShare | None = None
    """Share of GPU memory for the engine (mem_fraction_static); null: the engine's choice."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further ServerArgs by their own names, for example attention_backend, page_size."""


class SglangKind(EngineKind[SglangTarget]):
    name = "sglang"
    section = SglangTarget
    backend = "fledge.target.sglang.runner:SGLangEagle3TargetModel"
    argument_names = ("tp_size", "mem_fraction_static")


SGLANG = SglangKind()
