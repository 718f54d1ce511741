"""From the target's last hidden state to the supervision of a draft: the frozen head and softmax.

The trainer, the offline cache and the remote server all derive supervision here, so the three
encodings (logits, draft-vocabulary probabilities, last hidden states) cannot drift apart.

Shapes: N any flattened positions.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fledge.core.products import linear


@dataclass(frozen=True)
class TargetHead:
    """The target's frozen output head: everything between its last hidden state and its logits."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0  # logits are multiplied by it (Cohere's logit_scale)
    softcap: float | None = None  # Gemma's final soft-capping: cap * tanh(logits / cap)
    divisor: float = 1.0  # logits are divided by it (Granite); 1 / it as a scale rounds differently

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Full-vocabulary logits [N, V] in the head's dtype, with the target's order of ops."""
        logits_NV = linear(hidden_ND.to(self.weight_VD.dtype), self.weight_VD, self.bias_V)
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        if self.divisor != 1.0:
            logits_NV = logits_NV / self.divisor
        if self.softcap is not None:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        return logits_NV

    @classmethod
    def of(cls, head: "HeadLike") -> "TargetHead":
        """A head from any of the usual forms: a model's `lm_head` module, or its weight [V, D].

        A scale or soft cap that the model applies outside the module cannot be detected here; a
        backend's `info().head` includes them.
        """
        if isinstance(head, cls):
            return head
        weight_VD = head if isinstance(head, Tensor) else getattr(head, "weight", None)
        if not isinstance(weight_VD, Tensor) or weight_VD.ndim != 2:
            raise ValueError(
                "target_head: must be a TargetHead, the target's output module or its weight "
                f"[V, D], got {type(head).__name__}"
            )
        bias_V = getattr(head, "bias", None)
        return cls(weight_VD.detach(), None if bias_V is None else bias_V.detach())

    def to(self, device: torch.device | str) -> "TargetHead":
        bias_V = None if self.bias_V is None else self.bias_V.to(device)
        return replace(self, weight_VD=self.weight_VD.to(device), bias_V=bias_V)


HeadLike = TargetHead | nn.Module | Tensor  # what `TargetHead.of` accepts


@torch.no_grad()
def target_distribution(
    logits_NV: Tensor, selected_token_ids: Tensor, selected_token_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """What the draft should predict: probabilities [N, W] over its vocabulary, and coverage [N].

    `selected_token_ids` [W] are the target ids of the draft vocabulary in draft order,
    `selected_token_mask` [V] marks them. The second value [N] is True where the target's top token
    over the *whole* vocabulary is in the draft vocabulary.
    """
    probs_NW = torch.softmax(logits_NV[:, selected_token_ids].float(), dim=-1)
    return probs_NW, selected_token_mask[logits_NV.argmax(dim=-1)]


@torch.no_grad()
def target_distribution_from_hidden(
    hidden_ND: Tensor,
    head: TargetHead,
    selected_token_ids: Tensor,
    selected_token_mask: Tensor,
    *,
    chunk_rows: int = 1024,
) -> tuple[Tensor, Tensor]:
    """`target_distribution` from last hidden states, computing `chunk_rows` rows of logits at a
    time to bound memory."""
    parts = [
        target_distribution(head.logits(rows_JD), selected_token_ids, selected_token_mask)
        for rows_JD in torch.split(hidden_ND, chunk_rows)
    ]
    return torch.cat([probs for probs, _ in parts]), torch.cat([covered for _, covered in parts])


CHUNK_SCORES = 2**26  # elements of a [rows, vocabulary] chunk on a GPU
_CACHED_SCORES = 2**21  # on a CPU, whose cache then holds them
_ROWS = {"cpu": 256, "cuda": 2048}  # with fewer a product is bound by reading the head's weights


def rows_at_a_time(device: torch.device, width: int) -> int:
    """How many rows of [rows, vocabulary] are computed at a time."""
    scores = _CACHED_SCORES if device.type == "cpu" else CHUNK_SCORES
    return max(_ROWS.get(device.type, 1), scores // width)


@torch.no_grad()
def top_tokens(head: TargetHead, hidden_SD: Tensor, slot_M: Tensor) -> Tensor:
    """[M] the target's top token at some slots, from their last hidden states."""
    top = [
        head.logits(hidden_SD.index_select(0, slot_J)).argmax(dim=-1)
        for slot_J in torch.split(slot_M, rows_at_a_time(slot_M.device, len(head.weight_VD)))
    ]
    return torch.cat(top)


# --- picks ---------------------------------------------------------------------------------------
# The likeliest token of logits, and a placeholder where there is none.
#
# The maximum of values that include a NaN is the NaN. If its position counted as a token, it would
# agree with that of another model's NaN, and a broken pair would look like a perfect one.


NO_TOKEN = -2  # excluded from comparisons; -1 means that no model was asked (`measure.packed`)


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest tokens [...] of logits [..., V]; NO_TOKEN where the maximum is not finite."""
    top, token = logits.max(dim=-1)
    return tokens_of(token, top)


def tokens_of(token: Tensor, top: Tensor) -> Tensor:
    """The picked tokens, but NO_TOKEN where `top`, their logit or score, is not finite."""
    return token.where(top.isfinite(), NO_TOKEN)
