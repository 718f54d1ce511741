"""What the config of a block draft (DFlash, DSpark) holds beyond `DraftConfig`, and its checks."""

from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from fledge.methods.shared.config import EAGLE3_FLAGS, DraftConfig

# Read by decoding from `draft.config`, because they may change after the draft was built.
_OF_DECODING = {"confidence_threshold": 0.0, "confidence_temperatures": ()}


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    block_size: int  # slots
    sample_from_anchor: bool = False  # slot 0 predicts the first token; otherwise slot 1 does
    causal: bool = False  # inside the block
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    token_head: str = "markov"  # of `TOKEN_HEADS`
    markov_rank: int = 0  # of the token head; 0: none
    confidence_head: bool = False

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        config.qk_norm = True  # all block drafts have it
        for name, default in _OF_DECODING.items():
            if getattr(config, name, None) is None:
                setattr(config, name, default)
        read = super().of(config)
        for name in ("sliding_layers", "confidence_temperatures"):
            setattr(config, name, list(getattr(config, name)))
        if config.token_head == "markov":  # other programs know no other
            del config.token_head
        config.draft_tokens = read.drafts
        return read

    def check(self) -> None:
        super().check()
        least = self.first_place + 1
        if self.block_size < least:
            raise ValueError(f"block_size: at least {least}, got {self.block_size}")
        if self.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"hidden_size: must be the target's {self.target_hidden_size}, whose embedding and "
                f"head the draft uses; got {self.hidden_size}"
            )
        layers, sliding = self.num_hidden_layers, self.sliding_layers
        if not all(type(i) is int and 0 <= i < layers for i in sliding):
            raise ValueError(f"sliding_layers: of 0 .. {layers - 1}, got {list(sliding)}")
        if sliding and not self.sliding_window:
            raise ValueError("sliding_window: needed where layers slide")
        for name in (*EAGLE3_FLAGS, "attention_bias", "mlp_bias"):
            if vars(self)[name]:
                raise ValueError(f"{name}: block drafts have none")

    @property
    def first_place(self) -> int:
        """The slot that predicts the token after the newest one."""
        return 0 if self.sample_from_anchor else 1

    @property
    def drafts(self) -> int:
        """The number of tokens that a block proposes."""
        return self.block_size - self.first_place
