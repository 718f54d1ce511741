"""How far a draft gets from every slot of packed texts: one pass of the draft, the core of replay.

Texts lie in packs, as in training; the loss mask marks the answers. Slot t reads token t + 1 and
drafts token t + 2, so the slots that count are those whose next two tokens belong to one answer:
the first token of an answer comes from the prompt's pass.

    token            p p p a a a a p p        p prompt, a answer
    slot drafts      . . a a a . . . .        (tokens 4, 5, 6)

Shapes: B packs, T tokens of a pack, S = B * T slots, N rollout elements, E draft hidden,
W / V draft / target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.core.rows import TokenBatch
from fledge.draft.eagle3 import LlamaEagle3DraftModel
from fledge.draft.peagle import unroll_parallel
from fledge.rollout.parallel_plan import ParallelPlan, lay_out_parallel
from fledge.rollout.plan import RolloutPlan, flatten_slots, plan_rollout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_CHUNK_SCORES = {"cpu": 2**24, "cuda": 2**27}  # rows x vocabulary of one piece of logits


@dataclass(frozen=True)
class Answer:
    """One answer inside a pack: its document's slots, and where it lies among the document's."""

    row: int
    begin: int  # first slot of the document in the pack
    prompt: int  # tokens before the answer
    total: int  # tokens up to its end

    @property
    def slots(self) -> slice:
        """The document from its start to the answer's end, in the pack."""
        return slice(self.begin, self.begin + self.total)


def answers_of(tokens: TokenBatch) -> Iterator[Answer]:
    """Every run of supervised tokens that has something before it."""
    loss_BT = tokens.loss_mask.numpy() != 0
    assert tokens.seq_lens is not None
    for row, lens in enumerate(tokens.seq_lens.tolist()):
        begin = 0
        for length in lens:
            own_T = np.concatenate([[False], loss_BT[row, begin : begin + length], [False]])
            edges = np.flatnonzero(own_T[1:] != own_T[:-1])
            for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if start > 0:
                    yield Answer(row, begin, start, stop)
            begin += length


def drafting_slots(tokens: TokenBatch) -> Tensor:
    """[B, T] bool: slots that draft a token of an answer."""
    loss_BT = F.pad(tokens.loss_mask, (0, 2)).bool()
    assert tokens.doc_remaining is not None
    return loss_BT[:, 1:-1] & loss_BT[:, 2:] & (tokens.doc_remaining >= 2)


@dataclass(frozen=True)
class Rollouts:
    """The draft from every slot at once, chain or parallel, `depths` tokens far."""

    draft: LlamaEagle3DraftModel
    depths: int
    parallel: bool
    dtype: torch.dtype | None = None

    @property
    def device(self) -> torch.device:
        return self.draft.fc.weight.device

    @property
    def selected_token_ids(self) -> Tensor:
        """Target ids of the draft's tokens."""
        selected = self.draft.selected_token_ids
        if selected is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        return selected

    def plan(self, tokens: TokenBatch) -> RolloutPlan:
        """Every drafting slot starts a rollout that goes as far as its answer."""
        wanted_BT = drafting_slots(tokens)
        if not self.parallel:
            return plan_rollout(
                wanted_BT,
                tokens.attention_mask,
                num_depths=self.depths,
                position_ids=tokens.position_ids,
                seq_lens=tokens.seq_lens,
                doc_remaining=tokens.doc_remaining,
                device=self.device,
            )
        slots = flatten_slots(
            wanted_BT,
            tokens.attention_mask,
            tokens.position_ids,
            tokens.seq_lens,
            tokens.doc_remaining,
        )
        deepest_S = np.where(slots.target, _run_lengths(slots.target) - 1, 0)
        deepest_S = np.minimum(deepest_S, min(self.depths, len(deepest_S)) - 1)
        return lay_out_parallel(
            slots, deepest_S, num_depths=self.depths, partitions=1, device=self.device
        )

    def head_inputs(self, batch: Eagle3TargetBatch, plan: RolloutPlan) -> Sequence[Tensor]:
        """[N, E] per depth, in the plan's order of rows."""
        aux_TD = plan.on_key_axis(batch.aux_hidden_states.to(self.device))
        ids_T = plan.on_key_axis(batch.input_ids.to(self.device))
        if isinstance(plan, ParallelPlan):
            states = unroll_parallel(self.draft, aux_TD, ids_T, plan, compute_dtype=self.dtype)
            return plan.by_depth(states)
        return self.draft.unroll(aux_TD, ids_T, plan, compute_dtype=self.dtype)

    def tokens(self, head_input_NE: Tensor) -> Tensor:
        """[N] the target ids that are drafted."""
        selected_W = self.selected_token_ids
        head_WE = self.draft.lm_head.weight.to(head_input_NE.dtype)
        parts = _pieces(head_input_NE, len(head_WE))
        return torch.cat([selected_W[F.linear(part, head_WE).argmax(-1)] for part in parts])


@torch.no_grad()
def accepted_lengths(
    rollouts: Rollouts, batch: Eagle3TargetBatch, tokens: TokenBatch, pick_S: Ints
) -> Ints:
    """[B, T]: from each slot, how many drafted tokens in a row are the target's picks.

    `pick_S` [S] is what the target picks where slot t drafts (its token t + 2), -1 where none
    does. Where that is not the text's token, a draft may still be right, but nothing behind it can
    be judged.
    """
    text_BT = tokens.input_ids
    accepted_S = np.zeros(text_BT.numel(), dtype=np.int64)
    wanted_S = drafting_slots(tokens).flatten().numpy()
    if not wanted_S.any():
        return accepted_S.reshape(text_BT.shape)
    on_text_S = pick_S == F.pad(text_BT, (0, 2))[:, 2:].flatten().numpy()
    plan = rollouts.plan(tokens)
    slot_T = plan.slot_T.cpu().numpy()
    alive_S = wanted_S.copy()  # slots whose rollouts have been right, along the text, so far
    for depth, (rows, states_NE) in enumerate(
        zip(plan.depths, rollouts.head_inputs(batch, plan), strict=True)
    ):
        slot_N = slot_T[rows.slot_N.cpu().numpy()]
        # the head is asked about these only: most rollouts are over after a token or two
        index_M = np.flatnonzero(alive_S[slot_N])
        slot_M, alive_S = slot_N[index_M], np.zeros_like(alive_S)
        if len(index_M) == 0:
            break
        states_ME = states_NE[torch.from_numpy(index_M).to(states_NE.device)]
        right_M = rollouts.tokens(states_ME).cpu().numpy() == pick_S[slot_M + depth]
        accepted_S[slot_M[right_M]] += 1
        alive_S[slot_M[right_M & on_text_S[slot_M + depth]]] = True
    return accepted_S.reshape(text_BT.shape)


@torch.no_grad()
def target_picks(
    batch: Eagle3TargetBatch, tokens: TokenBatch, head: TargetHead, selected_W: Tensor
) -> Ints:
    """[S]: the target's likeliest token where slots draft; -1 elsewhere, and where probabilities
    over the draft vocabulary only say that it is outside."""
    wanted_S = drafting_slots(tokens).flatten()
    picks_S = np.full(len(wanted_S), -1, dtype=np.int64)
    if batch.target_probs is not None and batch.position_mask is not None:
        probs_NW = batch.target_probs.flatten(0, 1)[wanted_S.to(batch.target_probs.device)]
        covered_N = batch.position_mask.flatten()[wanted_S.to(batch.target_probs.device)] != 0
        token_N = selected_W.to(probs_NW.device)[probs_NW.argmax(-1)].where(covered_N, -1)
    elif batch.logits is not None:
        logits_SV = batch.logits.flatten(0, 1)
        token_N = logits_SV[wanted_S.to(logits_SV.device)].argmax(-1)
    else:
        assert batch.last_hidden_states is not None
        hidden_SD = batch.last_hidden_states.flatten(0, 1)
        hidden_ND = hidden_SD[wanted_S.to(hidden_SD.device)]
        parts = _pieces(hidden_ND, len(head.weight_VD))
        token_N = torch.cat([head.logits(part).argmax(-1) for part in parts])
    picks_S[wanted_S.numpy()] = token_N.cpu().numpy()
    return picks_S


def _pieces(rows_NX: Tensor, width: int) -> tuple[Tensor, ...]:
    most = _CHUNK_SCORES.get(rows_NX.device.type, _CHUNK_SCORES["cpu"])
    return torch.split(rows_NX, max(1, most // width))


def _run_lengths(marked_S: Bools) -> Ints:
    """[S]: marked slots from here on without a gap.

    Example: 1 1 0 1 -> 2 1 0 1
    """
    index = np.arange(len(marked_S), dtype=np.int64)
    gap = np.where(marked_S, len(marked_S), index)
    next_gap: Ints = np.minimum.accumulate(gap[::-1])[::-1]
    return next_gap - index
