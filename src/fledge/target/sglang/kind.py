"""`target.backend=sglang`: the target inside SGLang. Imports no torch when loaded."""

from typing import TYPE_CHECKING, Literal

from fledge.core.errors import BadInput
from fledge.target.kinds import EngineKind, EngineTarget

if TYPE_CHECKING:
    import torch

    from fledge.target.base import Eagle3TargetBackend


class SglangTarget(EngineTarget):
    """The target inside SGLang, in this process (extra: sglang)."""

    backend: Literal["sglang"] = "sglang"
    """SGLang's ModelRunner computes the states: the numbers that SGLang will serve."""


class SglangKind(EngineKind[SglangTarget]):
    name = "sglang"
    section = SglangTarget
    backend = "fledge.target.sglang.runner:SGLangEagle3TargetModel"
    argument_names = ("tp_size", "mem_fraction_static")

    def open(
        self, section: SglangTarget, *, device: "torch.device", aux_layers: int
    ) -> "Eagle3TargetBackend":
        from torch import distributed

        if distributed.is_initialized() and distributed.get_world_size() > 1:
            raise BadInput(
                "the ranks of a trainer ask about different rows, and those of an SGLang target "
                "about the same",
                where="target.backend=sglang",
                fix="run it in another process: fledge serve-target --engine sglang",
            )
        return super().open(section, device=device, aux_layers=aux_layers)


SGLANG = SglangKind()
