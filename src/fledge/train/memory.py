"""Bytes that a rank of a run holds, counted from shapes: exactly what stays, nearly what a step
needs besides.

`predict.py` counts for a run that is set up, `forecast.py` for one that is only a recipe.
"""

from dataclasses import dataclass
from typing import Any

import torch

from fledge.draft.layer import forget_mlp

SUPERVISED = 0.8  # a usual share of the tokens; what is not supervised pays almost nothing
_CHUNK = 4 * (1 << 26) * 4  # the head's chunk of logits, probabilities and gradients
_KEPT_MLP_GIB = 2.5  # beyond it the backward computes MLPs again


def draft_bytes(trained: int, frozen: int, *, shard: int = 1, width: int = 4) -> int:
    """Weights, gradients and moments. Ranks that share them have the whole weights, in the dtype of
    the step, and the whole gradients while a step runs."""
    if shard == 1:
        return 16 * trained + 4 * frozen
    return 12 * trained // shard + (width + 4) * trained + 4 * frozen


@dataclass(frozen=True)
class StepMemory:
    """What one step holds besides, by the shape of the draft and of what it is fed."""

    config: Any  # the draft's
    depths: int
    tokens: int  # of a micro-batch
    accumulate: int
    width: int  # bytes of a number

    def bytes(self, context: int = 1) -> int:
        """Of a rank, where so many share their rows."""
        config = self.config
        head_grad = config.draft_vocab_size * config.hidden_size * 4
        return int(self._layers(context) + self._states(context) + _CHUNK + head_grad)

    def _layers(self, context: int) -> float:
        """Per token and depth the backward keeps: q, k, v, attention's output, MLP's gate and up,
        norms. Depth-0 keys and values of all slots are on every rank."""
        config, rows = self.config, self.tokens * self.depths / context
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        per_row = heads * config.head_dim + 5 * config.hidden_size
        mlp = rows * 2 * config.intermediate_size
        dtype = torch.float32 if self.width == 4 else torch.bfloat16
        supervised = int(SUPERVISED * rows * config.num_hidden_layers)
        if forget_mlp(config, supervised, dtype, kept_gib=_KEPT_MLP_GIB):
            # computed again, one depth of one layer at a time: gate, up and both gradients
            mlp = self.tokens / context * 4 * config.intermediate_size / config.num_hidden_layers
        keys = 2 * self.tokens * config.num_key_value_heads * config.head_dim
        shared = keys if context > 1 else 0
        return float((rows * per_row + mlp + shared) * self.width * config.num_hidden_layers)

    def _states(self, context: int) -> float:
        """The target's answer: while it is made in two pieces, then this rank's part of it."""
        config = self.config
        per_token = (config.num_aux_hidden_states + 1) * config.target_hidden_size
        answer = float(self.tokens * per_token * self.width)
        if context == 1:
            return 2 * answer * self.accumulate
        return 2 * answer + answer * self.accumulate / context


def context_needed(step: StepMemory, free_bytes: float, *, most: int = 64) -> int | None:
    """The fewest ranks, a power of two, among which a step fits; None: not even the most help."""
    size = 1
    while size <= most:
        if step.bytes(size) <= free_bytes:
            return size
        size *= 2
    return None
