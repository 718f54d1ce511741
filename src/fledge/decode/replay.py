"""Exact acceptance without decoding: what live drafting would have done on a known text.

Greedy drafting accepts a token when it equals the text's. Up to the first miss a live chain reads
exactly the text's tokens, so the chain from *every* slot can be computed at once, teacher-forced,
by the rollout that training uses; walking the rounds over it gives the accepted lengths of live
decoding (`rounds.walk_rounds`). One pass of the target and one of the draft per text.

The text must be the target's own greedy text. How often the target, shown the text, would pick
another token is counted and returned: ties that rounding breaks differently, or a wrong text.

Shapes: B texts, T tokens of the longest, K drafted tokens, E draft hidden, W draft vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.decode.rounds import Round, walk_rounds
from fledge.draft.model import LlamaEagle3DraftModel
from fledge.rollout.parallel_plan import lay_out_parallel
from fledge.rollout.plan import RolloutPlan, flatten_slots, plan_rollout
from fledge.target.base import Eagle3TargetBackend
from fledge.target.batch import Eagle3TargetBatch
from fledge.target.head import TargetHead

_CHUNK_SCORES = 2**24  # rows x vocabulary of one piece of logits


@dataclass(frozen=True)
class Text:
    """A prompt and the target's own greedy answer to it, as tokens."""

    prompt_ids: Sequence[int]
    answer_ids: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.answer_ids)


@dataclass(frozen=True)
class Replay:
    """One text: how far the draft gets from every slot, and the rounds that live decoding takes."""

    accepted_T: list[int]  # from slot t: drafted tokens that equal the text's, counted inside it
    rounds: list[Round]
    other_picks: int  # answer tokens that the target, shown the text, would not have picked


def replay(
    target: Eagle3TargetBackend,
    draft: LlamaEagle3DraftModel,
    texts: Sequence[Text],
    *,
    num_draft_tokens: int = 7,
    method: str | None = None,
    draft_dtype: torch.dtype | None = None,
    batch_tokens: int = 8192,
    on_text: Callable[[int], None] | None = None,
) -> list[Replay]:
    """Replay every text; `method` is "chain" or "parallel", None what the draft was trained for.

    The target needs `supervision="hidden"`. Texts of similar length run together, up to
    `batch_tokens` tokens; `on_text` hears how many are done.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens must be positive, got {num_draft_tokens}")
    parallel = draft.config.parallel_drafting if method is None else method == "parallel"
    if method not in (None, "chain", "parallel"):
        raise ValueError(f"method: a chain or parallel tokens can be replayed, got {method!r}")
    if not all(len(text.prompt_ids) for text in texts):
        raise ValueError("texts: a prompt needs at least one token")
    found: dict[int, Replay] = {}
    rollout = _Rollout(draft.eval(), num_draft_tokens, parallel, draft_dtype)
    for members in _batches([len(text) for text in texts], batch_tokens):
        replays = _replay_batch(target, rollout, [texts[i] for i in members])
        found |= dict(zip(members, replays, strict=True))
        if on_text is not None:
            on_text(len(found))
    return [found[i] for i in range(len(texts))]


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Texts by length, as many at a time as fit when padded to the longest.

    The shortest is at least four fifths of the longest: padding is computed too.
    """
    members: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        length = lengths[index]
        if members and (
            (len(members) + 1) * length > batch_tokens or 5 * lengths[members[0]] < 4 * length
        ):
            yield members
            members = []
        members.append(index)
    if members:
        yield members


@dataclass(frozen=True)
class _Rollout:
    """The draft from every slot at once."""

    draft: LlamaEagle3DraftModel
    depths: int
    parallel: bool
    dtype: torch.dtype | None

    def plan(self, target_BT: Tensor, attention_mask: Tensor, device: torch.device) -> RolloutPlan:
        """`target_BT` marks the slots whose next-but-one token is to be drafted."""
        if not self.parallel:
            return plan_rollout(target_BT, attention_mask, num_depths=self.depths, device=device)
        slots = flatten_slots(target_BT, attention_mask, None, None, None)
        width = target_BT.shape[1]
        reach_BT = target_BT.long().flip(1).cumsum(1).flip(1)  # targets here and behind: one run
        deepest_S = np.where(slots.target, reach_BT.reshape(-1).numpy() - 1, 0)
        deepest_S = np.minimum(deepest_S, min(self.depths, width) - 1)
        return lay_out_parallel(
            slots, deepest_S, num_depths=self.depths, partitions=1, device=device
        )

    def drafted(self, batch: Eagle3TargetBatch, plan: RolloutPlan) -> list[Tensor]:
        """Per depth, the target id drafted in each row of the plan."""
        device = self.draft.fc.weight.device
        aux_TD = plan.on_key_axis(batch.aux_hidden_states.to(device))
        ids_T = plan.on_key_axis(batch.input_ids.to(device))
        if self.parallel:
            states = self.draft.unroll_parallel(aux_TD, ids_T, plan, compute_dtype=self.dtype)  # type: ignore[arg-type]
            by_depth: Sequence[Tensor] = plan.by_depth(states)
        else:
            by_depth = self.draft.unroll(aux_TD, ids_T, plan, compute_dtype=self.dtype)
        selected_W = self.draft.selected_token_ids
        if selected_W is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        head_WE = self.draft.lm_head.weight.to(by_depth[0].dtype)
        rows = max(1, _CHUNK_SCORES // len(head_WE))
        return [
            torch.cat(
                [
                    selected_W[F.linear(part, head_WE).argmax(-1)]
                    for part in torch.split(states_NE, rows)
                ]
            )
            for states_NE in by_depth
        ]


@torch.no_grad()
def _replay_batch(
    target: Eagle3TargetBackend, rollout: _Rollout, texts: list[Text]
) -> list[Replay]:
    width = max(len(text) for text in texts)
    ids_BT = torch.zeros((len(texts), width), dtype=torch.long)
    real_BT = torch.zeros_like(ids_BT)
    target_BT = torch.zeros_like(ids_BT)
    for row, text in enumerate(texts):
        ids_BT[row, : len(text)] = torch.tensor([*text.prompt_ids, *text.answer_ids])
        real_BT[row, : len(text)] = 1
        # slot t drafts token t + 2: from the prompt's last slot to the text's last token
        target_BT[row, len(text.prompt_ids) - 1 : max(0, len(text) - 2)] = 1
    batch = target.generate_batch(ids_BT, real_BT, real_BT)
    accepted_BT = np.zeros((len(texts), width), dtype=np.int64)
    if target_BT.any():
        plan = rollout.plan(target_BT, real_BT, rollout.draft.fc.weight.device)
        accepted_BT = _leading_hits(rollout.drafted(batch, plan), plan, ids_BT, target_BT)
    other_B = _other_picks(batch, target.info().head, ids_BT, texts)
    return [
        Replay(
            accepted_T=accepted.tolist(),
            rounds=walk_rounds(accepted.tolist(), prompt=len(text.prompt_ids), total=len(text)),
            other_picks=other,
        )
        for text, accepted, other in zip(texts, accepted_BT, other_B, strict=True)
    ]


def _leading_hits(
    drafted: list[Tensor], plan: RolloutPlan, ids_BT: Tensor, target_BT: Tensor
) -> np.ndarray:
    """[B, T]: from each slot, how many drafted tokens in a row equal the text's."""
    slot_T = plan.slot_T.cpu().numpy()
    text_S = ids_BT.flatten().numpy()
    in_answer_S = target_BT.flatten().numpy() != 0
    accepted_S = np.zeros(ids_BT.numel(), dtype=np.int64)
    for depth, (rows, token_N) in enumerate(zip(plan.depths, drafted, strict=True)):
        slot_N = slot_T[rows.slot_N.cpu().numpy()]
        # a row of this depth drafts a token of the text: the plan lets no rollout leave its answer
        right_N = token_N.cpu().numpy() == text_S[slot_N + depth + 2]
        right_N &= in_answer_S[slot_N] & (accepted_S[slot_N] == depth)  # and all before were right
        accepted_S[slot_N[right_N]] += 1
    return accepted_S.reshape(ids_BT.shape)


def _other_picks(
    batch: Eagle3TargetBatch, head: TargetHead, ids_BT: Tensor, texts: list[Text]
) -> list[int]:
    """Answer tokens (from the second on) that are not the target's likeliest after the text."""
    hidden_BTD = batch.last_hidden_states
    if hidden_BTD is None:
        raise ValueError("supervision: replay needs a target with supervision 'hidden'")
    counts = []
    for row, text in enumerate(texts):
        begin, end = len(text.prompt_ids) - 1, max(0, len(text) - 2)
        rows = max(1, _CHUNK_SCORES // len(head.weight_VD))
        picked = [
            head.logits(part).argmax(-1) for part in torch.split(hidden_BTD[row, begin:end], rows)
        ]
        picked_T = torch.cat(picked).cpu() if end > begin else ids_BT.new_empty(0)
        counts.append(int((picked_T != ids_BT[row, begin + 2 : end + 2]).sum()))
    return counts
