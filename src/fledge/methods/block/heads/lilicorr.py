"""LiLiCorr (arXiv 2608.20530): a small transformer over the best tokens of all slots scores pairs.

    item (s, j) = token_proj(E[c]) + pass_hidden_proj(h_s) + MLP(norm[log p, p, log p - max,
                  j / (C - 1), j = 0]) + slot_embedding_s + rank_embedding_j
    Z = layers(items), without a mask;  n = anchor_norm(context_proj(context before the block))
    f = silu(factor_input_proj [Z ; n ; Z * n]),  out, in = unit(out_head f), unit(in_head f)
    score = scale <start, in> at the first depth,  scale <out_i, in_j> between neighbours

with start = unit(anchor_out_head n). The draft's logits enter only as features of the items.
Charged are, in blocks that are supervised to their end, the slots up to the first text token that
is no candidate: their mean of CE among the candidates, and of the penalty sum_j softmax(score)_j
relu(l_text - l_j), with l the target's logits. No gradient flows into the embedding.

Shapes: N blocks, K depths, C candidates, I = K * C items, W width, Q heads.
"""

from functools import partial
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fledge.methods.block.config import BlockConfig
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.heads.base import (
    BlockCandidates,
    CandidateHead,
    Embed,
    at_least_fp32,
    cast_linear,
)
from fledge.methods.block.heads.candidates import CandidateTrainerModule, along_text, candidate_head
from fledge.methods.block.plan import BlockPlan
from fledge.methods.shared.best_tokens import Candidates, TopTokens
from fledge.methods.shared.head_loss import HeadTask
from fledge.methods.shared.norms import rms_norm
from fledge.methods.shared.rollout_objective import ReadyBatch

_FEATURES = 5  # numbers about a candidate that come from the draft's distribution
_ITEM_NUMBERS = 2**26  # of the items that are computed together; each pass is recomputed


class Mlp(nn.Module):
    def __init__(self, size: int, hidden: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, hidden), nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        return cast_linear(self.down_proj, F.silu(cast_linear(self.up_proj, x)))


class LatticeLayer(nn.Module):
    def __init__(self, config: BlockConfig, width: int) -> None:
        super().__init__()
        self.heads, hidden = config.lilicorr_num_heads, width * config.lilicorr_mlp_ratio
        self.attn_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.attn = nn.MultiheadAttention(width, self.heads, batch_first=True)  # holds the weights
        self.mlp_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = Mlp(width, hidden, width)

    def forward(self, x_NIW: Tensor, bias_QII: Tensor) -> Tensor:
        dtype, attn = x_NIW.dtype, self.attn
        normed = rms_norm(x_NIW, self.attn_norm.weight.to(dtype), self.attn_norm.eps or 0.0)
        packed = F.linear(normed, attn.in_proj_weight.to(dtype), attn.in_proj_bias.to(dtype))
        q, k, v = (
            torch.unflatten(y, -1, (self.heads, -1)).transpose(1, 2) for y in packed.chunk(3, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_QII.to(dtype))
        x_NIW = x_NIW + cast_linear(attn.out_proj, out.transpose(1, 2).flatten(-2))
        normed = rms_norm(x_NIW, self.mlp_norm.weight.to(dtype), self.mlp_norm.eps or 0.0)
        mlp: Tensor = self.mlp(normed)
        return x_NIW + mlp


class LiliCorr(CandidateHead):
    module_name: ClassVar[str] = "lilicorr"
    reads_normalizer: ClassVar[bool] = True
    reads_context: ClassVar[bool] = True

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        size, depths, factor = config.hidden_size, config.drafts, config.lilicorr_factor_dim
        width = config.lilicorr_hidden_size or size
        self.scale, self.eps = config.lilicorr_logit_scale, config.lilicorr_vector_eps
        self.token_proj = nn.Identity() if width == size else nn.Linear(size, width)
        self.pass_hidden_proj = nn.Linear(size, width)
        self.feature_norm = nn.LayerNorm(_FEATURES)
        self.feature_mlp = Mlp(_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.empty(1, 1, depths, 1, width))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, 1, self.count, width))
        self.relative_slot_bias = nn.Parameter(
            torch.empty(config.lilicorr_num_heads, 2 * config.size - 1)
        )
        self.same_slot_bias = nn.Parameter(torch.empty(config.lilicorr_num_heads))
        layers = range(config.lilicorr_num_layers)
        self.layers = nn.ModuleList(LatticeLayer(config, width) for _ in layers)
        self.output_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.context_proj = nn.Linear(size, width)
        self.anchor_norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, factor), nn.Linear(width, factor)
        self.anchor_out_head = nn.Linear(width, factor)

    def start(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or "embedding" in name:
                nn.init.zeros_(parameter)
        for layer in self.layers:
            attn: Any = layer.attn
            nn.init.normal_(attn.in_proj_weight, std=0.02)

    def scores(self, found: BlockCandidates, embed: Embed) -> tuple[Tensor, Tensor]:
        blocks, depths, count = found.id_NKC.shape
        step = max(1, _ITEM_NUMBERS // (4 * depths * count * self.output_norm.weight.numel()))
        parts = []
        for begin in range(0, max(1, blocks), step):
            part = found.part(begin, begin + step)
            scores: tuple[Tensor, Tensor]
            if torch.is_grad_enabled():
                scores = checkpoint(
                    self._scores, part, embed, use_reentrant=False, preserve_rng_state=False
                )
            else:
                scores = self._scores(part, embed)
            parts.append(scores)
        first, pairs = zip(*parts, strict=True)
        return torch.cat(first), torch.cat(pairs)

    def _scores(self, found: BlockCandidates, embed: Embed) -> tuple[Tensor, Tensor]:
        dtype = found.state_NKE.dtype
        item_NIW = self._items(found, embed(found.id_NKC)).flatten(1, 2)
        bias_QII = self._bias(*found.id_NKC.shape[1:])
        for layer in self.layers:
            item_NIW = layer(item_NIW, bias_QII)
        eps = self.output_norm.eps or 0.0
        z_NIW = rms_norm(item_NIW, self.output_norm.weight.to(dtype), eps)
        assert found.context_NE is not None
        anchor_NW = cast_linear(self.context_proj, found.context_NE.to(dtype))
        anchor_NW = rms_norm(anchor_NW, self.anchor_norm.weight.to(dtype), eps)
        n_NIW = anchor_NW[:, None].expand_as(z_NIW)
        joined = torch.cat([z_NIW, n_NIW, z_NIW * n_NIW], dim=-1)
        f_NIW = F.silu(cast_linear(self.factor_input_proj, joined))
        shape = found.id_NKC.shape[1:]
        out_NKCF = torch.unflatten(self._unit(cast_linear(self.out_head, f_NIW)), 1, shape)
        in_NKCF = torch.unflatten(self._unit(cast_linear(self.in_head, f_NIW)), 1, shape)
        start_NF = self._unit(cast_linear(self.anchor_out_head, anchor_NW))
        first_NC = self.scale * (in_NKCF[:, 0] @ start_NF[..., None])[..., 0]
        return first_NC, self.scale * (out_NKCF[:, :-1] @ in_NKCF[:, 1:].mT)

    def _items(self, found: BlockCandidates, embedding_NKCE: Tensor) -> Tensor:
        assert found.normalizer_NK is not None
        dtype, count = embedding_NKCE.dtype, found.id_NKC.shape[-1]
        logp_NKC = found.logit_NKC - found.normalizer_NK[..., None]
        rank_C = torch.arange(count, device=logp_NKC.device).to(logp_NKC.dtype)
        share, first = rank_C / max(1, count - 1), (rank_C == 0).to(logp_NKC.dtype)
        numbers = (
            logp_NKC, logp_NKC.exp(), logp_NKC - logp_NKC.amax(-1, keepdim=True),
            share.expand_as(logp_NKC), first.expand_as(logp_NKC),
        )  # fmt: skip
        norm = self.feature_norm
        features = F.layer_norm(
            torch.stack(numbers, -1), (_FEATURES,), norm.weight.to(logp_NKC.dtype),
            norm.bias.to(logp_NKC.dtype), norm.eps,
        ).to(dtype)  # fmt: skip
        token = embedding_NKCE
        if isinstance(self.token_proj, nn.Linear):
            token = cast_linear(self.token_proj, token)
        hidden = cast_linear(self.pass_hidden_proj, found.state_NKE)[:, :, None]
        mlp: Tensor = self.feature_mlp(features)
        places = (self.slot_embedding + self.rank_embedding)[0].to(dtype)
        return token + hidden + mlp + places

    def _bias(self, depths: int, count: int) -> Tensor:
        """[Q, I, I] biases of attention, by how many slots are between two items."""
        slot_I = torch.arange(depths, device=self.same_slot_bias.device).repeat_interleave(count)
        apart_II = slot_I[:, None] - slot_I
        zero = self.relative_slot_bias.shape[1] // 2
        same_QII = self.same_slot_bias[:, None, None] * (apart_II == 0)
        bias_QII: Tensor = self.relative_slot_bias[:, apart_II + zero] + same_QII
        return bias_QII

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x.to(at_least_fp32(x.dtype)), dim=-1, eps=self.eps)


# --- objective -----------------------------------------------------------------------------------


class LiliCorrTrainerModule(CandidateTrainerModule):
    """The draft and its objective; call it with `**batch.to_trainer_inputs()`. Further options are
    those of `DFlashTrainerModule`."""

    def __init__(
        self,
        draft_model: BlockDraftModel,
        *,
        pair_weight: float = 0.25,
        target_weight: float = 0.25,
        **options: Any,
    ) -> None:
        if not isinstance(draft_model.candidate_head, LiliCorr):
            raise ValueError("candidate_head: the draft was built without LiLiCorr's")
        super().__init__(draft_model, **options)
        self.pair_weight, self.target_weight = pair_weight, target_weight
        count = draft_model.spec.candidates
        self.top = TopTokens(count, normalizer=True, target=target_weight > 0)

    @property
    def reads_target(self) -> bool:
        return self.target_weight > 0 or super().reads_target

    def _choose(
        self,
        ready: ReadyBatch[BlockPlan],
        task: HeadTask,
        hidden_PE: Tensor,
        found: Candidates,
        coefficient_N: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        plan, draft, head = ready.plan, self.draft_model, candidate_head(self.draft_model)
        if len(plan.counts) < self.depths:  # no block is supervised to its end
            zero = hidden_PE.new_zeros((), dtype=found.logit_NC.dtype)
            return zero, zero
        place_BK = whole_blocks(plan)
        element_BK = torch.zeros_like(plan.element_P)
        element_BK[plan.head.element_N] = torch.arange(len(task.elements), device=place_BK.device)
        element_BK = element_BK[place_BK]
        whole_B = (plan.supervised_P[place_BK] & task.charged_N[element_BK]).all(1)
        id_BKC, label_BK = found.id_NC[element_BK], found.label_N[element_BK]
        right_BKC = id_BKC == label_BK[..., None]
        charged_BK = (right_BKC.any(-1) & whole_B[:, None]).long().cumprod(1).bool()
        assert found.normalizer_N is not None
        block_B = plan.element_P[place_BK[:, 0]] // draft.spec.size
        aux_BD = ready.aux_OD.index_select(0, plan.blocks.slot_N[block_B])
        candidates = BlockCandidates(
            self.selected_token_ids[id_BKC],
            found.logit_NC[element_BK],
            found.normalizer_N[element_BK],
            hidden_PE[place_BK],
            draft.project_hidden_states(aux_BD, hidden_PE.dtype),
            self._block_tokens(ready)[block_B, 0],
        )
        scores = head.scores(candidates, partial(draft.embed, dtype=hidden_PE.dtype))
        score_BKC = along_text(*scores, right_BKC[:, :-1])
        ce_BK = score_BKC.logsumexp(-1) - (score_BKC * right_BKC).sum(-1)
        loss_BK = self.pair_weight * ce_BK
        if found.target_NC is not None and found.target_label_N is not None:
            behind_BKC = found.target_label_N[element_BK][..., None] - found.target_NC[element_BK]
            penalty_BK = (score_BKC.softmax(-1) * behind_BKC.relu()).sum(-1)
            loss_BK = loss_BK + self.target_weight * penalty_BK
        return (loss_BK * charged_BK).sum(), charged_BK.sum().to(loss_BK.dtype)


def whole_blocks(plan: BlockPlan) -> Tensor:
    """[B, K] where, in the states of all depths end to end, those of the blocks are that reach the
    last depth; these come first at every depth."""
    place_B = torch.arange(plan.counts[-1], device=plan.element_P.device)
    offsets = accumulate(plan.counts[:-1], initial=0)
    return torch.stack([place_B + offset for offset in offsets], dim=1)
