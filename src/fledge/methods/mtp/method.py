"""MTP: the multi-token head that a model ships, tuned for several steps, or a new one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from fledge.core.registry import Registry
from fledge.methods.base import stated
from fledge.methods.eagle3.method import CHAIN, TREE, Eagle3
from fledge.methods.shared.config import WITHOUT_NORMS

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PretrainedConfig

    from fledge.core.errors import BadInput
    from fledge.formats.codec import Feature, TargetFacts
    from fledge.methods.mtp.formats import MtpView


_FORMATS = "fledge.methods.mtp.formats"


class Mtp(Eagle3):
    name = "mtp"
    title = "MTP"
    section_path = "fledge.methods.mtp.section:MtpSection"
    draft_path = "fledge.methods.mtp.draft:MtpDraftModel"
    fixed_draft: ClassVar[Mapping[str, Any]] = {
        "layers": 1,
        "draft_vocab_size": None,
        "intermediate_size": None,  # engines take the target's
        "head_from_target": True,
        "freeze_embeddings": True,
        "qk_norm": False,
        **WITHOUT_NORMS,
    }
    strategies = Registry("strategy", CHAIN | TREE)
    formats = Registry("engine", dict.fromkeys(("vllm", "sglang"), f"{_FORMATS}:MIMO_DIRECTORY"))
    algorithms: ClassVar[Mapping[str, str]] = {"vllm": "mtp", "sglang": "NEXTN"}

    # the class of such a head in vLLM reads the target's config, which must have its count
    vllm_flags: ClassVar[Sequence[str]] = ("--hf-overrides", '{"num_nextn_predict_layers": 1}')

    def owns(self, config: "PretrainedConfig") -> bool:
        return stated(config, "mtp_family") is not None

    def aux_layers(self, section: Any = None) -> int:
        return 1  # the state that the target's head reads

    def draft_settings(self, section: Any, *, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        return {"num_aux_hidden_states": 1}

    def derive(self, target_config: "PretrainedConfig", **keys: Any) -> "PretrainedConfig":
        from fledge.methods.mtp.checkpoint import derive_config

        return derive_config(target_config, **keys)

    def start_from_target(self, draft: Any, model: "Path") -> None:
        from fledge.methods.mtp.checkpoint import read_head

        draft.load_state_dict(read_head(model, draft))

    def reading(self, draft: Any) -> None:
        return None  # a norm comes before its map

    def bench_options(
        self, *, depths: int = 0, depth_keep: float = 1.0, **_: Any
    ) -> dict[str, Any]:
        return {"ttt_steps": depths or 3, "depth_keep": depth_keep}

    def version(self, config: "PretrainedConfig") -> str:
        return self.title

    def foreign(self) -> "type[MtpView]":
        from fledge.methods.mtp.formats import MtpView

        return MtpView

    def export_features(self, config: "PretrainedConfig") -> "dict[Feature, bool]":
        return {"norm_output": False, "attention bias": False}  # part of the method

    def refused_target(
        self, config: "PretrainedConfig", engine: str, target: "TargetFacts"
    ) -> "BadInput | None":
        from fledge.methods.mtp.formats import refused_directory

        return refused_directory(config, engine, target)


MTP = Mtp()
