"""What a strategy hands to the target in one round, and how tokens are picked from logits.

Shapes: N proposed tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to judge, as target ids."""

    token_BN: Tensor
    parent_BN: Tensor | None = None  # index of the parent, -1: the verified text; None: a chain
    probs_BNW: Tensor | None = None  # what each token was drawn from; None: it was the likeliest


@dataclass(frozen=True)
class Chooser:
    """How a token is picked from logits: the likeliest, or drawn at a temperature."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits.to(wide) / self.temperature, dim=-1)

    def draw(self, probs: Tensor) -> Tensor:
        """[...] one token of each distribution [..., V]."""
        flat = probs.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probs.shape[:-1])

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens, and the distributions they were drawn from (None when greedy)."""
        if self.temperature == 0:
            return logits.argmax(dim=-1), None
        probs = self.probabilities(logits)
        return self.draw(probs), probs
