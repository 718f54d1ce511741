"""`target.backend=sglang`: the target inside SGLang. Imports no torch when loaded."""

from typing import Literal

from fledge.target.kinds import EngineKind, EngineTarget


class SglangTarget(EngineTarget):
    """The target inside SGLang, in this process (extra: sglang)."""

    backend: Literal["sglang"] = "sglang"
    """SGLang's ModelRunner computes the states: the numbers that SGLang will serve."""


class SglangKind(EngineKind[SglangTarget]):
    name = "sglang"
    section = SglangTarget
    backend = "fledge.target.sglang.runner:SGLangEagle3TargetModel"
    argument_names = ("tp_size", "mem_fraction_static")


SGLANG = SglangKind()
