"""Exact acceptance without decoding: what live drafting would have done on a known text.

Greedy drafting accepts a token when it equals the text's. Up to the first miss a live chain reads
exactly the text's tokens, so the chain from *every* slot can be computed at once, teacher-forced,
by the rollout that training uses; walking the rounds over it gives the accepted lengths of live
decoding (`rounds.walk_rounds`). Texts are packed: one pass of the target and one of the draft for
all that fit together (`packed.py`).

The text must be the target's own greedy text. How often the target, given the text, would pick
another token is counted and returned: ties that rounding breaks differently, or a wrong text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.pack import Pack, Piece, collate, pack_rows
from fledge.decode.rounds import Round, walk_rounds
from fledge.decode.strategies.registry import rollouts_of
from fledge.decode.strategies.rollouts import Rollouts, drafting_slots
from fledge.draft.base import DraftModel
from fledge.measure.figures import Acceptance, count_rounds
from fledge.measure.packed import Ints, accepted_lengths, answers_of, target_picks
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite import checked_answer


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
    other_picks: int  # answer tokens that the target, given the text, would not have picked


def replay(
    target: Eagle3TargetBackend,
    draft: DraftModel,
    texts: Sequence[Text],
    *,
    num_draft_tokens: int = 7,
    method: str | None = None,
    draft_dtype: torch.dtype | None = None,
    batch_tokens: int = 8192,
    on_text: Callable[[int], None] | None = None,
) -> list[Replay]:
    """Replay every text. `method` names a strategy; None selects the one the draft was trained for.

    The target needs `supervision="hidden"`. Texts are packed up to `batch_tokens` tokens; `on_text`
    is called with the number of texts done.
    """
    rollouts = rollouts_of(draft, num_draft_tokens, name=method, dtype=draft_dtype)
    if not all(len(text.prompt_ids) for text in texts):
        raise ValueError("texts: a prompt needs at least one token")
    replays: dict[int, Replay] = {}
    for pack in packs_of([len(text) for text in texts], batch_tokens):
        members = [piece.row for piece in pack]
        pack_replays = _replay_pack(target, rollouts, [texts[i] for i in members])
        replays |= zip(members, pack_replays, strict=True)
        if on_text is not None:
            on_text(len(replays))
    return [replays[i] for i in range(len(texts))]


def packs_of(lengths: Sequence[int], batch_tokens: int) -> Sequence[Pack]:
    """Packs of texts that run together; packs hold at least the longest text."""
    return pack_rows(lengths, max(batch_tokens, *lengths)).packs if lengths else ()


def _replay_pack(
    target: Eagle3TargetBackend, rollouts: Rollouts, texts: list[Text]
) -> list[Replay]:
    tokens = as_pack(texts)
    batch = ask(target, tokens)
    text_T = F.pad(tokens.input_ids, (0, 2))[0, 2:].where(drafting_slots(tokens)[0], -1).numpy()
    accepted_T = accepted_lengths(rollouts, batch, tokens, text_T)[0]
    picks_T = target_picks(batch, tokens, target.info().head, rollouts.selected_token_ids)
    replays, begin = [], 0
    for text in texts:
        span = slice(begin, begin + len(text))
        accepted = accepted_T[span].tolist()
        rounds = walk_rounds(accepted, prompt=len(text.prompt_ids), total=len(text))
        other_picks = int((picks_T[span] != text_T[span]).sum())
        replays.append(Replay(accepted, rounds, other_picks))
        begin += len(text)
    return replays


def ask(target: Eagle3TargetBackend, tokens: TokenBatch) -> Eagle3TargetBatch:
    """The target's answer for a pack: its states, checked to be finite."""
    batch = checked_answer(target, tokens)
    if batch.last_hidden_states is None:
        raise ValueError("supervision: replay needs a target with supervision 'hidden'")
    return batch


def as_pack(texts: list[Text]) -> TokenBatch:
    """The texts as one pack without padding; the answers are supervised."""
    rows = []
    for text in texts:
        ids = np.array([*text.prompt_ids, *text.answer_ids], dtype=np.int32)
        answer = (np.arange(len(ids)) >= len(text.prompt_ids)).astype(np.uint8)
        rows.append(TokenRow(ids, answer, "", truncated=False))
    pack = tuple(Piece(i, 0, len(text)) for i, text in enumerate(texts))
    return collate(rows, [pack], sum(map(len, texts)), pad_id=0)


def replay_held_out(
    batch: Eagle3TargetBatch, tokens: TokenBatch, rollouts: Rollouts, picks_S: Ints
) -> Acceptance:
    """The acceptance of rounds through the supervised answers of packs, whoever wrote them.

    A drafted token counts when it is the target's pick (`packed.target_picks`) after the text so
    far; the walk then continues along the text. On the target's own text these are the rounds of
    `replay`.
    """
    accepted_BT = accepted_lengths(rollouts, batch, tokens, picks_S)
    pairs = []
    for answer in answers_of(tokens):
        accepted = accepted_BT[answer.row, answer.slots].tolist()
        rounds = walk_rounds(accepted, prompt=answer.prompt, total=answer.total)
        pairs += [(round_, answer.total) for round_ in rounds]
    return count_rounds(pairs, rollouts.depths)
