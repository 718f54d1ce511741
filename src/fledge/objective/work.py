"""What a step computes and keeps, counted from shapes: for predictions and for benchmarks.

A method says which of these describes it (`Method.work`). Operations are those of matrix products,
a multiply-add is two; recomputation counts nothing, for it is a choice. Bytes are what autograd
keeps of the draft between forward and backward.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from fledge.draft.mlp import forget_mlp
from fledge.objective.supervision import CHUNK_SCORES

SUPERVISED = 0.8  # a usual share of the tokens; what is not supervised pays almost nothing
CHUNK = 4 * CHUNK_SCORES * 4.0  # logits, probabilities and gradients in float32
_KEPT_MLP_GIB = 2.5  # beyond it the backward of a chain computes MLPs again


class Work(ABC):
    """Of one draft, under one objective."""

    draft: Any  # a DraftModel, perhaps without memory

    @property
    def config(self) -> Any:
        return self.draft.config

    # --- predicted, for a pack whose tokens are supervised as usual; `seen`: keys of a query -----

    @abstractmethod
    def step(self, seen: float = 0.0) -> float:
        """Operations a token, forward and backward."""

    @abstractmethod
    def scored(self, seen: float = 0.0) -> float:
        """Operations a token where nothing is learnt from it: forward alone."""

    @abstractmethod
    def replayed(self, seen: float = 0.0) -> float:
        """Operations a token of a text that is replayed: it is drafted from everywhere."""

    @abstractmethod
    def kept_bytes(self, tokens: int, width: int, context: int = 1) -> float:
        """What layers keep of a micro-batch, in numbers of `width` bytes, on one of `context` ranks
        that share its rows; and what the loss sums up gradients in."""

    def chunk_bytes(self, tokens: int, width: int) -> float:
        """What the loss holds while a chunk of logits exists."""
        return CHUNK

    # --- of a batch that is laid out -------------------------------------------------------------

    @abstractmethod
    def planned(self, plan: Any, seen: float) -> float:
        """Operations of a step on exactly this plan, forward and backward; `seen`: keys that a
        token of it sees on average."""

    @abstractmethod
    def target_logits(self, plan: Any) -> float:
        """How many of the target's logits its loss asks for."""


def matrices(modules: Any) -> int:
    """Weights of matrices: what a row is multiplied with."""
    return sum(p.numel() for module in modules for p in module.parameters() if p.ndim == 2)


@dataclass(frozen=True)
class ChainWork(Work):
    """Every supervised token starts a rollout of `depths` elements, each of which runs all layers
    and the draft's own head: EAGLE-1, EAGLE-3, and P-EAGLE, whose elements run side by side."""

    draft: Any
    depths: int

    def _forward(self, share: float, seen: float) -> float:
        """Multiply-adds a token, if such a share of the tokens starts a rollout."""
        config, draft = self.config, self.draft
        width = config.num_attention_heads * config.head_dim
        attention = 2 * width * seen * config.num_hidden_layers
        element = matrices(draft.layers) + attention + draft.lm_head.weight.numel()
        return float(share * self.depths * element + draft.fc.weight.numel())

    def step(self, seen: float = 0.0) -> float:
        return 6 * self._forward(SUPERVISED, seen)

    def scored(self, seen: float = 0.0) -> float:
        return 2 * self._forward(SUPERVISED, seen)

    def replayed(self, seen: float = 0.0) -> float:
        return 2 * self._forward(1.0, seen)

    def kept_bytes(self, tokens: int, width: int, context: int = 1) -> float:
        """Per token and depth the backward keeps: q, k, v, attention's output, MLP's gate and up,
        norms. Depth-0 keys and values of all slots are on every rank."""
        config, rows = self.config, tokens * self.depths / context
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        per_row = heads * config.head_dim + 5 * config.hidden_size
        mlp = rows * 2 * config.intermediate_size
        dtype = torch.float32 if width == 4 else torch.bfloat16
        supervised = int(SUPERVISED * rows * config.num_hidden_layers)
        if forget_mlp(config, supervised, dtype, kept_gib=_KEPT_MLP_GIB):
            # computed again, one depth of one layer at a time: gate, up and both gradients
            mlp = tokens / context * 4 * config.intermediate_size / config.num_hidden_layers
        keys = 2 * tokens * config.num_key_value_heads * config.head_dim
        shared = keys if context > 1 else 0
        layers = (rows * per_row + mlp + shared) * width * config.num_hidden_layers
        head_gradient = config.draft_vocab_size * config.hidden_size * 4
        return float(layers + head_gradient)

    def planned(self, plan: Any, seen: float) -> float:
        slots, elements = len(plan.slot_T), sum(plan.counts)
        config, draft = self.config, self.draft
        width = config.num_attention_heads * config.head_dim
        total = 2.0 * float(draft.fc.weight.numel()) * slots
        for index, layer in enumerate(draft.layers):
            # lower layers run every slot at depth 0, the last one only what is asked for
            rows = elements + (slots - plan.counts[0] if index < len(draft.layers) - 1 else 0)
            total += 2 * matrices([layer]) * rows + 4 * width * seen * rows
        return 3 * (total + 2.0 * float(draft.lm_head.weight.numel()) * len(plan.head))

    def target_logits(self, plan: Any) -> float:
        """The top token is sought in all, probabilities are those of the draft's vocabulary."""
        return float((self.config.vocab_size + self.config.draft_vocab_size) * len(plan.target_M))
