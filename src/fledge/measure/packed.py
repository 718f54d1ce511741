"""How far a draft gets from every slot of packed texts: one pass of the draft, the core of replay.

Texts are packed as in training; the loss mask marks the answers. Which slots count, and what is
drafted from them, is defined in `decode.strategies.rollouts`.

Shapes: N rollout elements of a depth.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import TargetHead
from fledge.core.picks import NO_TOKEN, likeliest, tokens_of
from fledge.core.rows import TokenBatch
from fledge.decode.strategies.rollouts import Rollouts, drafting_slots
from fledge.target.finite import Fault, place_of, refusal

Ints = NDArray[np.int64]

_CHUNK_SCORES = {"cpu": 2**24, "cuda": 2**27}  # rows x vocabulary of one chunk of logits


@dataclass(frozen=True)
class AnswerSpan:
    """One answer inside a pack: the slots of its document, and its place in the document."""

    row: int
    begin: int  # first slot of the document in the pack
    prompt: int  # tokens before the answer
    total: int  # tokens up to its end

    @property
    def slots(self) -> slice:
        """The document from its start to the answer's end, in the pack."""
        return slice(self.begin, self.begin + self.total)


def answers_of(tokens: TokenBatch) -> Iterator[AnswerSpan]:
    """Every run of supervised tokens that has something before it."""
    loss_BT = tokens.loss_mask.numpy() != 0
    assert tokens.seq_lens is not None
    for row, lens in enumerate(tokens.seq_lens.tolist()):
        begin = 0
        for length in lens:
            supervised_T = np.concatenate([[False], loss_BT[row, begin : begin + length], [False]])
            edges = np.flatnonzero(supervised_T[1:] != supervised_T[:-1])
            for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                if start > 0:
                    yield AnswerSpan(row, begin, start, stop)
            begin += length


@torch.no_grad()
def accepted_lengths(
    rollouts: Rollouts, batch: Eagle3TargetBatch, tokens: TokenBatch, pick_S: Ints
) -> Ints:
    """[B, T]: from each slot, how many drafted tokens in a row are the target's picks.

    `pick_S` [S] is the target's pick for the token t + 2 that slot t drafts, -1 where a slot does
    not draft. Where that is not the text's token, a draft may still be right, but nothing after it
    can be judged.
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
        # the head is computed for these only: most rollouts are over after a token or two
        index_M = np.flatnonzero(alive_S[slot_N])
        slot_M, alive_S = slot_N[index_M], np.zeros_like(alive_S)
        if len(index_M) == 0:
            break
        states_ME = states_NE[torch.from_numpy(index_M).to(states_NE.device)]
        right_M = drafted_tokens(rollouts, states_ME).cpu().numpy() == pick_S[slot_M + depth]
        accepted_S[slot_M[right_M]] += 1
        alive_S[slot_M[right_M & on_text_S[slot_M + depth]]] = True
    return accepted_S.reshape(text_BT.shape)


def drafted_tokens(rollouts: Rollouts, head_input_NE: Tensor) -> Tensor:
    """[N] the drafted tokens as target ids; NO_TOKEN where the draft's numbers are not finite."""
    selected_W = rollouts.selected_token_ids
    parts = _chunks(head_input_NE, len(selected_W))
    tops = [rollouts.logits(part).max(-1) for part in parts]
    return torch.cat([tokens_of(selected_W[top.indices], top.values) for top in tops])


@torch.no_grad()
def target_picks(
    batch: Eagle3TargetBatch, tokens: TokenBatch, head: TargetHead, selected_W: Tensor
) -> Ints:
    """[S]: the target's likeliest token where slots draft; -1 elsewhere, and where it is outside
    the draft vocabulary and only probabilities over that are known. Logits that are not finite are
    an error: the states are finite (`target.finite`), so it is the head that overflows."""
    wanted_S = drafting_slots(tokens).flatten()
    picks_S = np.full(len(wanted_S), -1, dtype=np.int64)
    if batch.target_probs is not None and batch.position_mask is not None:
        probs_NW = batch.target_probs.flatten(0, 1)[wanted_S.to(batch.target_probs.device)]
        covered_N = batch.position_mask.flatten()[wanted_S.to(batch.target_probs.device)] != 0
        token_N = selected_W.to(probs_NW.device)[probs_NW.argmax(-1)].where(covered_N, -1)
    elif batch.logits is not None:
        logits_SV = batch.logits.flatten(0, 1)
        token_N = likeliest(logits_SV[wanted_S.to(logits_SV.device)])
    else:
        assert batch.last_hidden_states is not None
        hidden_SD = batch.last_hidden_states.flatten(0, 1)
        hidden_ND = hidden_SD[wanted_S.to(hidden_SD.device)]
        parts = _chunks(hidden_ND, len(head.weight_VD))
        token_N = torch.cat([likeliest(head.logits(part)) for part in parts])
    picks_S[wanted_S.numpy()] = token_N.cpu().numpy()
    if len(bad_S := np.flatnonzero(picks_S == NO_TOKEN)):
        row, slot = divmod(int(bad_S[0]), tokens.shape[1])
        fault = Fault("logits", row, slot + 1)  # at token t + 1: slot t drafts the one after it
        dtype = batch.aux_hidden_states.dtype
        raise refusal(fault, dtype=dtype, place=place_of(tokens, fault))
    return picks_S


def _chunks(rows_NX: Tensor, width: int) -> tuple[Tensor, ...]:
    most = _CHUNK_SCORES.get(rows_NX.device.type, _CHUNK_SCORES["cpu"])
    return torch.split(rows_NX, max(1, most // width))
