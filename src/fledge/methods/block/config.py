"""What the config of a block draft holds beyond `DraftConfig`, and its checks."""

from dataclasses import dataclass, fields
from typing import Self

from transformers import PretrainedConfig

from fledge.core.reading import ListOf, Maybe, Number, Text, Whole
from fledge.methods.base import stated
from fledge.methods.registry import CANDIDATE_HEADS, TOKEN_HEADS
from fledge.methods.shared.config import EAGLE3_FLAGS, FLAG, DraftConfig, key


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    block_size: int = key(Maybe(Whole(1, 2**10)))  # slots
    # slot 0 predicts the first token; otherwise slot 1 does
    sample_from_anchor: bool = key(FLAG, default=False)
    causal: bool = key(FLAG, default=False)  # inside the block
    sliding_window: int | None = key(Maybe(Whole(1, 2**31)), None)
    sliding_layers: tuple[int, ...] = key(Maybe(ListOf(Whole(0, 2**10), most=2**10)), ())
    sliding_both_ways: bool = key(FLAG, default=False)  # else they are causal inside the block
    token_head: str = key(Maybe(Text(64)), "markov")  # of `TOKEN_HEADS`
    markov_rank: int = key(Maybe(Whole(0, 2**14)), 0)  # of the token head; 0: none
    confidence_head: bool = key(FLAG, default=False)
    # Domino's: width of its memory, and tokens that it leaves uncorrected
    gru_hidden_dim: int = key(Maybe(Whole(1, 2**16)), 1024)
    pure_draft_prefix_len: int = key(Maybe(Whole(0, 2**10)), 1)
    num_jacobi_passes: int = key(Maybe(Whole(0, 2**10)), 6)  # XPress's
    candidate_head: str = key(Maybe(Text(64)), "")  # of `CANDIDATE_HEADS`; "": none
    candidates: int = key(Maybe(Whole(1, 2**10)), 16)  # tokens that it chooses among
    selector_rank: int = key(Maybe(Whole(1, 2**14)), 256)
    lilicorr_hidden_size: int = key(Maybe(Whole(0, 2**16)), 0)  # 0: the draft's
    lilicorr_num_layers: int = key(Maybe(Whole(1, 2**10)), 2)
    lilicorr_num_heads: int = key(Maybe(Whole(1, 2**10)), 8)
    lilicorr_mlp_ratio: int = key(Maybe(Whole(1, 2**10)), 2)
    lilicorr_factor_dim: int = key(Maybe(Whole(1, 2**16)), 1024)
    lilicorr_vector_eps: float = key(Maybe(Number(0, 1)), 1e-4)
    lilicorr_logit_scale: float = key(Maybe(Number(0, 1e6)), 8.0)
    conv_kernel_size: int = key(Maybe(Whole(0, 2**10)), 0)  # taps of the convolutions; 0: none
    conv_group_size: int = key(Maybe(Whole(1, 2**16)), 16)
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
        for name, default in _HEAD_KEYS.items():  # drafts without such a head do not state them
            if stated(config, name) == default:
                delattr(config, name)
        # no engine reads the last slot of a Domino block
        served = read.size - 1 if read.token_head == "domino" else read.drafts
        config.draft_tokens = served
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
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            raise ValueError(
                f"conv_group_size: {self.hidden_size} is not a multiple of {self.conv_group_size}"
            )
        for name, known in (("token_head", TOKEN_HEADS), ("candidate_head", CANDIDATE_HEADS)):
            if vars(self)[name] not in ("", *known):
                raise ValueError(f"{name}: of {', '.join(known)}, got {vars(self)[name]!r}")
        width, heads = self.lilicorr_hidden_size or self.hidden_size, self.lilicorr_num_heads
        if self.candidate_head == "lilicorr" and width % heads:
            raise ValueError(f"lilicorr_num_heads: {width} is not a multiple of {heads}")
        if self.candidate_head and self.candidates > self.draft_vocab_size:
            raise ValueError(f"candidates: at most {self.draft_vocab_size}, got {self.candidates}")
        if self.candidate_head and self.sample_from_anchor:
            raise ValueError("sample_from_anchor: must be false with a candidate head")
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


_OF_HEADS = (
    "token_head", "gru_", "pure_draft_", "num_jacobi_", "candidate", "selector_", "lilicorr_",
    "conv_", "sliding_both_",
)  # fmt: skip
_HEAD_KEYS = {
    key.name: key.default for key in fields(BlockConfig) if key.name.startswith(_OF_HEADS)
}
