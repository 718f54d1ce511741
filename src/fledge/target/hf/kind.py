"""`target.backend=hf`: the target in the training process. Imports no torch when loaded."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from fledge.core.settings import Device, NonNegative
from fledge.target.kinds import LoadedKind, LoadedTarget, Parallel

if TYPE_CHECKING:
    import torch

    from fledge.target.base import Eagle3TargetBackend


class HfTarget(LoadedTarget):
    """The target in the training process, through Hugging Face transformers."""

    backend: Literal["hf"] = "hf"
    """In this process: the simplest, if target and draft fit on one machine."""

    device: Device = "auto"
    """auto: the trainer's own device."""

    attn_implementation: (
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None
    ) = None
    """Attention implementation in transformers; null: its default."""

    compile: bool = True
    """On a GPU, compile the target's layers; small models run as CUDA graphs."""

    keep_states_gb: NonNegative = 0.0
    """Keep the target's states on its device up to this size: later epochs then need no target."""

    parallel: Parallel = Field(default_factory=Parallel)
    """Processes that share one target, where it is larger than a GPU: parallel.fsdp, .tp, .cp."""

    @model_validator(mode="after")
    def _check_kept_states(self) -> "HfTarget":
        if self.parallel.ranks > 1 and self.keep_states_gb:
            raise ValueError("keep_states_gb needs a target that is not shared: leave parallel out")
        return self


class HfKind(LoadedKind[HfTarget]):
    name = "hf"
    section = HfTarget

    def open(
        self, section: HfTarget, *, device: "torch.device", aux_layers: int
    ) -> "Eagle3TargetBackend":
        from fledge.core.machine import find_device
        from fledge.target.hf.model import HFEagle3TargetModel
        from fledge.target.hf.parallel import target_mesh
        from fledge.target.state_cache import RememberingTarget

        device = find_device(device if section.device == "auto" else section.device)
        parallel = section.parallel
        mesh = target_mesh(device, fsdp=parallel.fsdp, cp=parallel.cp, tp=parallel.tp)
        target = HFEagle3TargetModel.from_pretrained(
            section.model,
            aux_layer_ids=section.aux_layer_ids,
            supervision=section.supervision,
            dtype=_dtype_name(section, device),
            device=device,
            attn_implementation=section.attn_implementation,
            compile_layers=section.compile,
            trust_remote_code=section.trust_remote_code,
            num_aux_layers=aux_layers if section.aux_layer_ids is None else None,
            mesh=mesh,
        )
        kept = self.kept_bytes(section)
        return RememberingTarget(target, kept) if kept else target

    def dtype(self, section: HfTarget, device: "torch.device") -> "torch.dtype":
        chosen = section.model_copy(update={"dtype": _dtype_name(section, device)})
        return super().dtype(chosen, device)

    def asked_once(self, section: HfTarget) -> HfTarget:
        """The section without kept states and compilation: batches of a precompute differ in width,
        and each would be compiled anew."""
        return section.model_copy(update={"keep_states_gb": 0.0, "compile": False})

    def cut(self, section: HfTarget) -> Parallel:
        return section.parallel

    def kept_bytes(self, section: HfTarget) -> int:
        return int(section.keep_states_gb * 2**30) if section.supervision == "hidden" else 0


def _dtype_name(section: HfTarget, device: "torch.device") -> str:
    """As named; auto: as stored, but float32 becomes bfloat16 where the device multiplies it, on a
    CPU only for GGUF models, whose weights had fewer bits before; and what is stored in bfloat16
    becomes float32 on a CPU that does not multiply it."""
    import torch

    from fledge.core.machine import multiplies_bfloat16
    from fledge.models.resolve import comes_as_gguf
    from fledge.target.kinds import target_config

    stored = getattr(target_config(section), "dtype", None) if section.dtype == "auto" else None
    on_cpu, fast = device.type == "cpu", multiplies_bfloat16(device)
    if stored == torch.float32 and fast and (not on_cpu or comes_as_gguf(section.model)):
        return "bfloat16"
    return "float32" if stored == torch.bfloat16 and on_cpu and not fast else section.dtype


HF = HfKind()
