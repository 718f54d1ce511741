"""The target's answer at the slots that hold targets, in any of the three encodings.

Three encodings, one interface: probabilities for a range of slots when a chunk of the loss needs
them, and, before that, coverage (is the target's top token in the draft vocabulary?) for all slots.
No [slots, V] tensor outlives a chunk, unless it is part of the batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from fledge.core.head import TargetHead, rows_at_a_time, target_distribution, top_tokens
from fledge.methods.shared.config import DraftConfig
from fledge.rollout.plan import RolloutPlan


class Supervision(Protocol):
    def probs(self, begin: int, end: int) -> Tensor:
        """[end - begin, W], fp32 or as stored: the target's distribution at these target slots."""
        ...

    def coverage(self) -> Tensor:
        """[M] bool: the target's top token is in the draft vocabulary."""
        ...


@dataclass(frozen=True)
class VocabularyTensors:
    """The draft vocabulary: target ids [W] in draft order, and membership [V]."""

    ids_W: Tensor
    member_V: Tensor


@dataclass(frozen=True)
class LogitsSupervision:
    logits_SV: Tensor  # the whole batch flattened
    slot_M: Tensor
    vocabulary: VocabularyTensors

    def probs(self, begin: int, end: int) -> Tensor:
        rows_JV = self.logits_SV.index_select(0, self.slot_M[begin:end])
        return target_distribution(rows_JV, self.vocabulary.ids_W, self.vocabulary.member_V)[0]

    def coverage(self) -> Tensor:
        top = [
            self.logits_SV.index_select(0, slot_J).argmax(dim=-1)
            for slot_J in torch.split(
                self.slot_M, rows_at_a_time(self.slot_M.device, self.logits_SV.shape[-1])
            )
        ]
        return self.vocabulary.member_V[torch.cat(top)]


@dataclass(frozen=True)
class ProbsSupervision:
    probs_SW: Tensor
    mask_S: Tensor
    slot_M: Tensor

    def probs(self, begin: int, end: int) -> Tensor:
        return self.probs_SW.index_select(0, self.slot_M[begin:end])

    def coverage(self) -> Tensor:
        return self.mask_S.index_select(0, self.slot_M) != 0


@dataclass(frozen=True)
class HiddenSupervision:
    hidden_SD: Tensor
    slot_M: Tensor
    head: TargetHead
    draft_head: TargetHead  # the head's rows for the draft vocabulary, enough for probabilities
    vocabulary: VocabularyTensors
    covered_S: Tensor | None = None  # bool, where the target remembers it

    @torch.no_grad()
    def probs(self, begin: int, end: int) -> Tensor:
        rows_JD = self.hidden_SD.index_select(0, self.slot_M[begin:end])
        return torch.softmax(self.draft_head.logits(rows_JD), dim=-1, dtype=torch.float32)

    @torch.no_grad()
    def coverage(self) -> Tensor:
        if len(self.vocabulary.ids_W) == len(self.vocabulary.member_V):
            return torch.ones_like(self.slot_M, dtype=torch.bool)
        if self.covered_S is not None:
            return self.covered_S.index_select(0, self.slot_M)
        return self.vocabulary.member_V[top_tokens(self.head, self.hidden_SD, self.slot_M)]


def check_shapes(
    input_ids: Tensor,  # [B, T]
    given: Mapping[str, Tensor | None],  # the other inputs of a batch by name
    *,
    config: DraftConfig,
    vocabulary: VocabularyTensors,
    head: TargetHead | None,
) -> None:
    """Raise ValueError for a tensor that does not fit the rows, the draft or its vocabulary."""
    rows_BT = list(input_ids.shape)
    shapes = {
        "attention_mask": rows_BT,
        "loss_mask": rows_BT,
        "aux_hidden_states": [*rows_BT, config.aux_width],
        "target_logits": [*rows_BT, len(vocabulary.member_V)],
        "target_probs": [*rows_BT, len(vocabulary.ids_W)],
        "position_mask": [*rows_BT, 1],
        "covered": [*rows_BT, 1],
    }
    if head is not None:
        shapes["target_last_hidden_states"] = [*rows_BT, head.weight_VD.shape[1]]
    for name, shape in shapes.items():
        tensor = given.get(name)
        if tensor is not None and list(tensor.shape) != shape:
            raise ValueError(f"{name}: must be {shape}, got {list(tensor.shape)}")


def read_supervision(
    plan: RolloutPlan,
    vocabulary: VocabularyTensors,
    heads: Callable[[torch.device], tuple[TargetHead, TargetHead]],  # whole, and draft vocabulary
    *,
    target_logits: Tensor | None = None,  # [B, T, V]
    target_probs: Tensor | None = None,  # [B, T, W]
    position_mask: Tensor | None = None,  # [B, T, 1]
    target_last_hidden_states: Tensor | None = None,  # [B, T, D]
    covered: Tensor | None = None,  # [B, T, 1], if known beside hidden states
) -> Supervision:
    """The one encoding that a batch contains."""
    encodings = (target_logits, target_probs, target_last_hidden_states)
    exactly_one = sum(encoding is not None for encoding in encodings) == 1
    if not exactly_one or (target_probs is None) != (position_mask is None):
        raise ValueError(
            "supervision: give exactly one of target_logits, target_probs with position_mask, "
            "target_last_hidden_states"
        )
    slot_M, flat = plan.answered_M, plan.answered
    if target_logits is not None:
        return LogitsSupervision(flat(target_logits), slot_M, vocabulary)
    if target_probs is not None and position_mask is not None:
        return ProbsSupervision(flat(target_probs), flat(position_mask)[..., 0], slot_M)
    assert target_last_hidden_states is not None
    hidden_SD = flat(target_last_hidden_states)
    covered_S = None if covered is None else flat(covered)[..., 0]
    return HiddenSupervision(hidden_SD, slot_M, *heads(hidden_SD.device), vocabulary, covered_S)


def head_rows(head: TargetHead, vocabulary: VocabularyTensors) -> TargetHead:
    """The head reduced to the draft vocabulary (the head itself if that is the full vocabulary)."""
    if len(vocabulary.ids_W) == len(vocabulary.member_V):
        return head
    bias_V = head.bias_V
    return replace(
        head,
        weight_VD=head.weight_VD[vocabulary.ids_W],
        bias_V=None if bias_V is None else bias_V[vocabulary.ids_W],
    )
