"""Small heads of block drafts, each with its own tensors.

A *token head* adds a term to the logits of a slot that depends on the token before it, so that the
tokens of a block are drafted left to right although their states are computed in one pass:

    logits [N, W] = head(states [N, E]) + features [N, R] @ out_WR.T

The loss and decoding use only these two factors. A new token head is one class and one line in
`TOKEN_HEADS` (`method.py`); recipes choose it with `objective.token_head`. The *confidence head*
predicts how likely a drafted token is to be accepted.

Shapes: N slots of blocks, R rank.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.block.config import BlockConfig


class TokenHead(nn.Module, ABC):
    """Built from a draft's config; its tensors are in the draft's files as NAME_head.*."""

    @abstractmethod
    def features(self, previous_N: Tensor, dtype: torch.dtype) -> Tensor:
        """[..., R] features of the previous tokens, which are given as target ids."""

    @property
    @abstractmethod
    def out_WR(self) -> Tensor:  # noqa: N802  (its shape)
        """The factor that turns features into logits; zeros in a new draft."""


class MarkovHead(TokenHead):
    """logits += W2 . W1[previous token] (DSpark)."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def features(self, previous_N: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(previous_N, self.markov_w1.weight).to(dtype)

    @property
    def out_WR(self) -> Tensor:  # noqa: N802
        return self.markov_w2.weight


class ConfidenceHead(nn.Module):
    """w . [state; features of the previous token] + b: the log-odds that a token is accepted."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, state_NE: Tensor, features_NR: Tensor | None) -> Tensor:
        """[...] log-odds in fp32, or wider if the state is."""
        wide = torch.promote_types(state_NE.dtype, torch.float32)
        parts = [state_NE] if features_NR is None else [state_NE, features_NR]
        inputs = torch.cat([part.to(wide) for part in parts], dim=-1)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(inputs, weight, bias).squeeze(-1)
