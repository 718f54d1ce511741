"""What the config of a block draft (DFlash, DSpark) holds beyond `DraftConfig`, and its checks."""

from dataclasses import dataclass
from typing import Self

from transformers import PretrainedConfig

from fledge.core.reading import ListOf, Maybe, Number, Text, Whole
from fledge.methods.base import stated
from fledge.methods.shared.config import EAGLE3_FLAGS, FLAG, DraftConfig, key


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    block_size: int = key(Maybe(Whole(1, 2**10)))  # slots
    # slot 0 predicts the first token; otherwise slot 1 does
    sample_from_anchor: bool = key(FLAG, default=False)
    causal: bool = key(FLAG, default=False)  # inside the block
    sliding_window: int | None = key(Maybe(Whole(1, 2**31)), None)
    sliding_layers: tuple[int, ...] = key(Maybe(ListOf(Whole(0, 2**10), most=2**10)), ())
    token_head: str = key(Maybe(Text(64)), "markov")  # of `TOKEN_HEADS`
    markov_rank: int = key(Maybe(Whole(0, 2**14)), 0)  # of the token head; 0: none
    confidence_head: bool = key(FLAG, default=False)
    # decoding reads these two from `draft.config`: they may change after the draft was built
    confidence_threshold: float = key(Maybe(Number(0, 1)), 0.0)
    confidence_temperatures: tuple[float, ...] = key(
        Maybe(ListOf(Number(1e-6, 1e6), most=2**10)), ()
    )

    @classmethod
    def of(cls, config: PretrainedConfig) -> Self:
        config.qk_norm = True  # all block drafts have it
        read = super().of(config)
        for name in ("sliding_layers", "confidence_temperatures"):
            setattr(config, name, list(stated(config, name)))
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
        self.refuse(*EAGLE3_FLAGS, "attention_bias", "mlp_bias", family="block")

    @property
    def size(self) -> int:
        """The number of slots of a block."""
        return self.block_size

    @property
    def first_place(self) -> int:
        """The slot that predicts the token after the newest one."""
        return 0 if self.sample_from_anchor else 1

    @property
    def place(self) -> tuple[int, int]:
        """The number of slots of a block, and the slot that predicts depth 0."""
        return self.size, self.first_place

    @property
    def drafts(self) -> int:
        """The number of tokens that a block proposes."""
        return self.size - self.first_place
