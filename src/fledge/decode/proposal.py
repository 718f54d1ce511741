"""What a strategy proposes to the target in one round, and how tokens are picked from logits.

Shapes: N proposed tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.core.picks import tokens_of


@dataclass(frozen=True)
class Proposal:
    """Tokens for the target to judge, as target ids."""

    token_BN: Tensor  # NO_TOKEN (`core.picks`): the draft's numbers were not finite, never accepted
    parent_BN: Tensor | None = None  # index of the parent, -1: the verified text; None: a chain
    probs_BNW: Tensor | None = None  # the distributions they were drawn from; None: greedy


@dataclass(frozen=True)
class Chooser:
    """How a token is picked from logits: the likeliest, or drawn at a temperature."""

    temperature: float = 0.0
    generator: torch.Generator | None = None

    def probabilities(self, logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        return torch.softmax(logits.to(wide) / self.temperature, dim=-1)

    def draw(self, probs: Tensor) -> Tensor:
        """[...] one token drawn from each distribution [..., V]."""
        flat = probs.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probs.shape[:-1])

    def pick(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """The tokens, and the distributions they were drawn from (None when greedy)."""
        token, _, probs = self.pick_scored(logits)
        return token, probs

    def pick_scored(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The same with the largest logits in between: where these are not finite, the token is
        meaningless (`core.picks`)."""
        if self.temperature == 0:
            top, token = logits.max(dim=-1)
            return token, top, None
        top = logits.amax(dim=-1)
        # uniform where they are not finite: on a GPU, sampling from NaN ends the process
        probs = self.probabilities(logits.masked_fill(~top.isfinite()[..., None], 0.0))
        return self.draw(probs), top, probs

    def pick_sound(self, logits: Tensor) -> Tensor:
        """The tokens; NO_TOKEN where the logits are not finite."""
        token, top, _ = self.pick_scored(logits)
        return tokens_of(token, top)
