"""DSpark's two heads: a Markov head, which makes a token depend on the one before it, and a
confidence head, which predicts whether it is accepted."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.block.config import BlockConfig
from fledge.methods.block.heads.base import StepHead, at_least_fp32


class MarkovHead(StepHead):
    """logits += W2 . W1[previous token]"""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    def features(self, previous_N: Tensor, state_NE: Tensor, memory_NM: Tensor | None) -> Tensor:
        return F.embedding(previous_N, self.markov_w1.weight).to(state_NE.dtype)

    @property
    def out_WR(self) -> Tensor:  # noqa: N802  (its shape)
        return self.markov_w2.weight


class ConfidenceHead(nn.Module):
    """w . [state; features of the previous token] + b: the log-odds that a token is accepted."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.hidden_size + config.markov_rank, 1)

    def forward(self, state_NE: Tensor, features_NR: Tensor | None) -> Tensor:
        """[...] log-odds in fp32, or wider if the state is."""
        wide = at_least_fp32(state_NE.dtype)
        parts = [state_NE] if features_NR is None else [state_NE, features_NR]
        inputs = torch.cat([part.to(wide) for part in parts], dim=-1)
        weight, bias = self.proj.weight.to(wide), self.proj.bias.to(wide)
        return F.linear(inputs, weight, bias).squeeze(-1)
