"""What the config of a native multi-token head holds beyond `DraftConfig`, and its checks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from transformers import PretrainedConfig

from fledge.core.reading import OBJECT, Choice, Maybe
from fledge.methods.mtp.families import FAMILIES, MIMO, Family
from fledge.methods.shared.config import EAGLE3_FLAGS, DraftConfig, key


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DraftConfig):
    mtp_family: str = key(Maybe(Choice(tuple(FAMILIES))), MIMO.name)

    # of a target whose layers transformers computes: its text config
    layer_config: Mapping[str, Any] | None = key(Maybe(OBJECT), None)

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        config.norm_output = True  # the next step reads the normed state
        return super().of(config)

    def check(self) -> None:
        super().check()
        self.refuse(*{*EAGLE3_FLAGS} - {"norm_output"}, "mlp_bias", family="MTP")
        fixed = {
            "draft_vocab_size": self.vocab_size,  # the target's head is the draft's
            "target_hidden_size": self.hidden_size,
            "num_aux_hidden_states": 1,
            "num_hidden_layers": 1,
        }
        if self.hosted != (self.layer_config is not None):
            needs = "needs the target's text config" if self.hosted else "has none"
            raise ValueError(f"layer_config: the family {self.mtp_family} {needs}")
        for name, wanted in fixed.items():
            if (value := vars(self)[name]) != wanted:
                raise ValueError(f"{name}: must be {wanted} in MTP drafts, got {value}")

    @property
    def hosted(self) -> bool:
        """Whether the layer is transformers' own."""
        return bool(self.family.layers)

    @property
    def family(self) -> Family:
        return FAMILIES[self.mtp_family]

    @property
    def fc_inputs(self) -> int:
        return 2 * self.hidden_size  # a token and a state

    @property
    def output_bias(self) -> bool:
        return False  # only q, k and v have biases

    @property
    def extra_norms(self) -> bool:
        return False
