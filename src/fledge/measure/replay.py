"""Exact acceptance without decoding: what live drafting would have done on a known text.

Up to its first miss a greedy chain reads exactly the text's tokens, so the chain from *every* slot
can be computed at once, teacher-forced, by the rollout that training uses; `walk_rounds` over it
gives the accepted lengths of live decoding. The text must be the target's own greedy text.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.head import NO_TOKEN, TargetHead, likeliest, tokens_of
from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.pack import Pack, Piece, collate, pack_rows
from fledge.decode.accept import walk_rounds
from fledge.decode.stops import Pieces
from fledge.decode.strategy import Rollouts, drafting_slots, rollouts_of
from fledge.measure.figures import Acceptance, Sample, count_rounds
from fledge.measure.figures import Text as Text
from fledge.methods.shared.draft import DraftModel
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite_check import Fault, checked_answer, place_of, refusal

Ints = NDArray[np.int64]

_CHUNK_SCORES = {"cpu": 2**24, "cuda": 2**27}  # rows x vocabulary of one chunk of logits


class AnswerSpan(NamedTuple):
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
    an error: the states are finite (`target.finite_check`), so it is the head that overflows."""
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


@dataclass(frozen=True)
class Replay(Sample):
    """A text with the rounds that live decoding takes. `accepted_T[t]`: from slot t, the drafted
    tokens in a row that equal the text's."""

    accepted_T: Sequence[int] = ()
    other_picks: int = 0  # answer tokens that the target, given the text, would not have picked


def replay(
    target: Eagle3TargetBackend,
    draft: DraftModel,
    texts: Sequence[Text],
    *,
    num_draft_tokens: int = 7,
    method: str | None = None,
    draft_dtype: torch.dtype | None = None,
    batch_tokens: int = 8192,
    on_text: Callable[[int], None] = lambda done: None,
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
        replays.append(
            Replay(
                text.prompt_ids, text.answer_ids, rounds, accepted_T=accepted,
                other_picks=other_picks,
            )
        )  # fmt: skip
        begin += len(text)
    return replays


def ask(target: Eagle3TargetBackend, tokens: TokenBatch) -> Eagle3TargetBatch:
    """The target's answer for a pack: its states, checked to be finite."""
    batch = checked_answer(target, tokens)
    if batch.last_hidden_states is None:
        raise ValueError("supervision: replay needs a target with supervision 'hidden'")
    return batch


def as_pack(texts: Sequence[Text]) -> TokenBatch:
    """The texts as one pack without padding; the answers are supervised."""
    rows = []
    for text in texts:
        ids = np.array([*text.prompt_ids, *text.answer_ids], dtype=np.int32)
        answer = (np.arange(len(ids)) >= len(text.prompt_ids)).astype(np.uint8)
        rows.append(TokenRow(ids, answer, "", truncated=False))
    pack = tuple(Piece(i, len(text)) for i, text in enumerate(texts))
    return collate(rows, [pack], sum(map(len, texts)), pad_id=0)


def replay_held_out(
    batch: Eagle3TargetBatch, tokens: TokenBatch, rollouts: Rollouts, picks_S: Ints
) -> Acceptance:
    """The acceptance of rounds through the supervised answers of packs, whoever wrote them.

    A drafted token counts when it is the target's pick (`target_picks`) after the text so
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


# --- tokens --------------------------------------------------------------------------------------
# Who wrote each token of an answer, and both models' probabilities: the report colors them.
#
# The accepted tokens of a round are the draft's, at depths 1, 2, ..., and the token after them is
# the target's. Probabilities come from one pass of each model over the finished text: at the slot
# and depth where a token was drafted live.


class Drafted(NamedTuple):
    """What the draft proposed in one place."""

    token: int
    probability: float  # of its own token
    of_text: float  # of the text's token


class WrittenToken(NamedTuple):
    """One token of an answer."""

    text: str
    depth: int  # drafted and accepted as the k-th of its round; 0: the target's own
    round: int  # from 0; -1: the first token, which belongs to no round
    target_p: float | None = None
    draft_p: float | None = None  # None: the draft was not evaluated here
    instead: str | None = None  # what the draft proposed, where the target rejected it
    instead_p: float | None = None

    def to_json(self) -> list[Any]:
        """A compact row, since a page holds thousands."""
        return [round(value, 4) if isinstance(value, float) else value for value in self]


def written_tokens(
    text: Sample,
    tokenizer: Any,
    *,
    target_p: Sequence[float | None] = (),
    drafted: dict[tuple[int, int], Drafted] | None = None,
) -> list[WrittenToken]:
    """The answer's tokens. `drafted` is keyed by (context of the round, depth from 0); `target_p`
    has one entry per token."""
    pieces = Pieces(tokenizer, skip_special_tokens=False).add(text.answer_ids)
    target_p = target_p or [None] * len(pieces)
    tokens = [WrittenToken(piece, 0, -1, target_p[0]) for piece in pieces[:1]]
    for number, r in enumerate(text.rounds):
        for k in range(r.emitted):
            depth = k + 1 if k < r.accepted else 0
            index = r.context + k - len(text.prompt_ids)
            token = WrittenToken(pieces[index], depth, number, target_p[index])
            if proposed := (drafted or {}).get((r.context, k)):
                token = token._replace(draft_p=proposed.of_text)
                if depth == 0:
                    instead = tokenizer.decode([proposed.token])
                    token = token._replace(instead=instead, instead_p=proposed.probability)
            tokens.append(token)
    return tokens


@torch.no_grad()
def look_closely(
    target: Eagle3TargetBackend, rollouts: Rollouts, text: Sample, tokenizer: Any
) -> list[WrittenToken]:
    """The tokens of a replayed text with both models' probabilities."""
    tokens = as_pack([text])
    batch = ask(target, tokens)
    assert batch.last_hidden_states is not None
    total, prompt = len(text), len(text.prompt_ids)
    ids = [*text.prompt_ids, *text.answer_ids]
    target_p: list[float | None] = [None] * (total - prompt)
    for begin in range(max(2, prompt), total, 256):  # slot t predicts token t + 2
        part = torch.arange(begin, min(begin + 256, total))
        hidden_ND = batch.last_hidden_states[0, (part - 2).to(batch.last_hidden_states.device)]
        probs_NV = torch.softmax(target.info().head.logits(hidden_ND).float(), dim=-1).cpu()
        of_text = probs_NV.gather(1, torch.tensor(ids)[part][:, None])[:, 0].tolist()
        target_p[begin - prompt : begin - prompt + len(of_text)] = of_text
    drafted: dict[tuple[int, int], Drafted] = {}
    if not text.rounds:
        return written_tokens(text, tokenizer, target_p=target_p)
    plan = rollouts.plan(tokens)
    for depth, (rows, states_NE) in enumerate(
        zip(plan.depths, rollouts.head_inputs(batch, plan), strict=True)
    ):
        # rounds that drafted a token inside the text there
        drafting = [r for r in text.rounds if depth < min(r.accepted + 1, total - r.context)]
        row_of = {slot: row for row, slot in enumerate(plan.slot_T[rows.slot_N].tolist())}
        states_ME = states_NE[[row_of[r.context - 2] for r in drafting]]
        text_ids = [ids[r.context + depth] for r in drafting]
        for r, token in zip(drafting, _drafted(rollouts, states_ME, text_ids), strict=True):
            if token is not None:
                drafted[r.context, depth] = token
    return written_tokens(text, tokenizer, target_p=target_p, drafted=drafted)


def _drafted(
    rollouts: Rollouts, states_ME: Tensor, text_ids: Sequence[int]
) -> list[Drafted | None]:
    """What the draft proposes in some places, None where it proposes nothing; `text_ids` are the
    text's tokens there."""
    selected_W, logits_MW = rollouts.selected_token_ids, rollouts.logits(states_ME).float()
    probs_MW = torch.softmax(logits_MW, dim=-1)
    best_M = probs_MW.max(dim=-1)
    text_M1 = torch.tensor(text_ids, device=selected_W.device, dtype=torch.long)[:, None]
    of_text_M = (probs_MW * (selected_W == text_M1)).sum(-1)
    columns = (selected_W[best_M.indices], best_M.values, of_text_M)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    proposes_M = logits_MW.amax(-1).isfinite().tolist()
    return [Drafted(*row) if some else None for row, some in zip(rows, proposes_M, strict=True)]
