"""What a small head on a block draft is: a *token head* adds a term to the logits of a slot that
depends on the tokens before it; a *candidate head* scores the best tokens of neighbouring slots.

    token head        logits [N, W] = head(states [N, E]) + features [N, R] @ out_WR.T
    candidate head    first [N, C] and pairs [N, K - 1, C, C]: scores of the candidates of the first
                      depth, and of every depth's given the one chosen before (`walk` picks)

Both are built from a draft's config and train jointly with the backbone. Each head has one file
here: its tensors, its objective and how it drafts. A recipe names the method, whose draft names the
head: one class and one line in `methods/registry.py`.

Shapes: N blocks (or single elements) of J slots, K depths, R rank, C candidates, M memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.block.config import BlockConfig


class TokenHead(nn.Module, ABC):
    """Its tensors are in the draft's files as NAME_head.*."""

    first_depth: int = 0  # the logits of the depths before it stay as they are
    whole_blocks: ClassVar[bool] = False  # it reads the states of all slots of a block

    @property
    @abstractmethod
    def out_WR(self) -> Tensor:  # noqa: N802  (its shape)
        """The factor that turns features into logits; zeros in a new draft."""

    def start(self) -> None:
        """Set the weights of a new draft, where they are not normally distributed."""
        nn.init.zeros_(self.out_WR)  # it adds nothing to the logits yet


class StepHead(TokenHead):
    """A token head that drafts left to right: one token after another, from the states of one pass.

    What it keeps of a block's tokens so far is its *memory*, if it has one.
    """

    has_memory: ClassVar[bool] = False

    @abstractmethod
    def features(self, previous_N: Tensor, state_NE: Tensor, memory_NM: Tensor | None) -> Tensor:
        """[..., R] features, given the previous tokens (target ids) and the slots' states."""

    def inputs(self, embedding_NE: Tensor) -> Tensor:
        """What `remember` reads of a token, from its embedding."""
        raise NotImplementedError

    def remember(self, memory_NM: Tensor | None, inputs_NX: Tensor) -> Tensor:
        """The memory after one more token; before the block's first token it is None."""
        raise NotImplementedError


Embed = Callable[[Tensor], Tensor]  # token ids -> the target's embeddings


@dataclass(frozen=True)
class BlockCandidates:
    """What a candidate head reads about whole blocks."""

    id_NKC: Tensor  # target ids of the best tokens, likeliest first
    logit_NKC: Tensor
    normalizer_NK: Tensor | None  # log of the sum over the vocabulary, if the head reads it
    state_NKE: Tensor
    context_NE: Tensor | None  # the target's features before the block, if the head reads them
    newest_N: Tensor  # target ids of the blocks' first tokens

    def part(self, begin: int, end: int) -> "BlockCandidates":
        """The blocks from `begin` to `end`."""
        values = (None if x is None else x[begin:end] for x in vars(self).values())
        return BlockCandidates(*values)  # type: ignore[arg-type]


class CandidateHead(nn.Module, ABC):
    """Its tensors are in the draft's files under `module_name`."""

    module_name: ClassVar[str]
    reads_normalizer: ClassVar[bool] = False
    reads_context: ClassVar[bool] = False

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.count = config.candidates

    @abstractmethod
    def scores(self, found: BlockCandidates, embed: Embed) -> tuple[Tensor, Tensor]:
        """Scores of the first depth's candidates [N, C], and of every later depth's candidates j
        after candidate i of the depth before [N, K - 1, C (i), C (j)]."""

    @abstractmethod
    def start(self) -> None:
        """Set the weights of a new draft, where they are not normally distributed."""


def cast_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """A linear layer in the dtype of its input: masters may be wider."""
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return F.linear(x, layer.weight.to(x.dtype), bias)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
