"""DFlash 2's selector: pairs of neighbouring tokens score each other, in a space the slot chooses.

    score_s(b after p) = logits_s[b] + <P[p] * W h_s, S[b]>      for the best C tokens b of slot s

P and S are the two codebooks, W the projection of the slot's state. Training reads the text's token
as p, and charges the cross entropy among the candidates beside DFlash's own loss, with the weights
of its depths. If the right token is not a candidate it replaces the last one ("replace"), or the
slot is not charged ("skip"). A new draft starts with S = 0: the walk takes the likeliest tokens.
"""

from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.methods.block.config import BlockConfig
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.heads.base import (
    BlockCandidates,
    CandidateHead,
    Embed,
    at_least_fp32,
    cast_linear,
)
from fledge.methods.block.heads.candidates import CandidateTrainerModule
from fledge.methods.block.plan import BlockPlan
from fledge.methods.shared.best_tokens import Candidates, TopTokens
from fledge.methods.shared.head_loss import HeadTask
from fledge.methods.shared.rollout_objective import ReadyBatch


class Selector(CandidateHead):
    module_name: ClassVar[str] = "candidate_selector"

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        vocabulary, rank = config.vocab_size, config.selector_rank
        self.deviation = config.initializer_range
        self.predecessor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocabulary, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def start(self) -> None:
        nn.init.normal_(self.predecessor_codebook, std=self.deviation)
        nn.init.zeros_(self.successor_codebook)

    def after(self, state_NE: Tensor, token_N: Tensor) -> Tensor:
        """[..., R] what a slot looks for after a token."""
        projected = cast_linear(self.hidden_projection, state_NE).to(at_least_fp32(state_NE.dtype))
        return F.embedding(token_N, self.predecessor_codebook).to(projected.dtype) * projected

    def successors(self, id_NC: Tensor, dtype: torch.dtype) -> Tensor:
        return F.embedding(id_NC, self.successor_codebook).to(dtype)

    def scores(self, found: BlockCandidates, embed: Embed) -> tuple[Tensor, Tensor]:
        id_NKC, logit_NKC, state_NKE = found.id_NKC, found.logit_NKC, found.state_NKE
        successor_NKCR = self.successors(id_NKC, logit_NKC.dtype)
        first_NR = self.after(state_NKE[:, 0], found.newest_N)
        first_NC = logit_NKC[:, 0] + (successor_NKCR[:, 0] @ first_NR[..., None])[..., 0]
        count = id_NKC.shape[-1]
        state_NKCE = state_NKE[:, 1:, None].expand(-1, -1, count, -1)
        wanted_NKCR = self.after(state_NKCE, id_NKC[:, :-1])
        pair_NKCC = wanted_NKCR @ successor_NKCR[:, 1:].mT
        return first_NC, logit_NKC[:, 1:, None] + pair_NKCC


# --- objective -----------------------------------------------------------------------------------


class DFlash2TrainerModule(CandidateTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`. Further options are
    those of `DFlashTrainerModule`."""

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        selector_weight: float = 1.0,
        missing: Literal["replace", "skip"] = "replace",
        **options: Any,
    ) -> None:
        if not isinstance(draft_model.candidate_head, Selector):
            raise ValueError("candidate_head: the draft was built without a selector")
        if missing not in ("replace", "skip"):
            raise ValueError(f"missing: 'replace' or 'skip', got {missing!r}")
        super().__init__(draft_model, **options)
        self.selector_weight = selector_weight
        self.counts_found = missing == "skip"
        count = draft_model.spec.candidates
        self.top = TopTokens(count, with_label=missing == "replace")

    def _choose(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        found: Candidates,
        coefficient_N: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        head = self.draft_model.candidate_head
        assert isinstance(head, Selector)
        state_NE = hidden_PE.index_select(0, task.elements.element_N)
        wanted_NR = head.after(state_NE, self._previous_tokens(ready))
        successor_NCR = head.successors(self.selected_token_ids[found.id_NC], wanted_NR.dtype)
        score_NC = found.logit_NC + (successor_NCR @ wanted_NR[..., None])[..., 0]
        right_NC = found.id_NC == found.label_N[:, None]
        ce_N = score_NC.logsumexp(-1) - (score_NC * right_NC).sum(-1)
        charged_N = task.charged_N & right_NC.any(-1)
        weight_N = torch.where(charged_N, coefficient_N, 0.0).to(ce_N.dtype)
        loss = self.selector_weight * (ce_N * weight_N).sum()
        return loss, weight_N.sum() if self.counts_found else None
