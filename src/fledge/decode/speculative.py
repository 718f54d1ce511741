"""Speculative generation: draft, verify, roll back, repeat. The text is the target's own.

A round: the draft runs the slots that the last one verified, with the target's true features, and
proposes tokens; the target reads the last known token and the proposed ones in one pass; what it
accepts and one token of its own are appended; both caches drop the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.head import NO_TOKEN
from fledge.decode.accept import Chooser, Proposal, Round, Verdict, judge, judge_drawn, pack_picks
from fledge.decode.recorded import Passes, RoundClock, Timing
from fledge.decode.stops import Finish, Stops
from fledge.decode.strategy import (
    DraftShape,
    RoundState,
    Slots,
    Strategy,
    TreeShape,
    choose,
    send_rows,
)
from fledge.decode.target import CachedTarget, take
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel
from fledge.target.finite_check import Fault, NotFinite, refusal
from fledge.target.layers import target_depth, validate_aux_layer_ids

_COLDEST = 1e-5  # colder sampling is greedy, and logits divided by it could overflow


@dataclass
class Generation:
    """One prompt's continuation, and the rounds that produced it."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)  # new ones only, the ending token included
    finish: Finish | None = None
    rounds: list[Round] = field(default_factory=list)  # empty without a draft

    @property
    def known(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def depths(self) -> list[int]:
        """Per new token: its depth (from 1) if the draft wrote it, 0 if the target did."""
        depths = [0] * len(self.token_ids)
        for round_ in self.rounds:  # a round adds its accepted tokens first, then the target's own
            begin = round_.context - len(self.prompt_ids)
            depths[begin : begin + round_.accepted] = range(1, round_.accepted + 1)
        return depths

    def add(self, tokens: Sequence[int], stops: Stops) -> int:
        """Append tokens up to where the text ends, and return how many were appended."""
        before = len(self.token_ids)
        self.token_ids += tokens
        count, self.finish = stops.cut(self.token_ids, before)
        del self.token_ids[count:]
        return count - before


class SpeculativeDecoder:
    """A Hugging Face target with a draft, or, for comparison, without one.

    `method` names a strategy; None selects the one that the draft was trained for.
    `num_draft_tokens` is the length of a chain, or the number of parallel tokens; a tree has its
    own shape. `record`: whether greedy decoding on a GPU runs recorded passes (`recorded`).
    """

    def __init__(
        self,
        model: nn.Module,
        draft: DraftModel | None = None,
        *,
        aux_layer_ids: Sequence[int] | None = None,
        method: str | None = None,
        num_draft_tokens: int = 7,
        tree: TreeShape | None = None,
        draft_dtype: torch.dtype | None = None,
        record: bool = True,
    ) -> None:
        kind = None if draft is None else choose(draft, method)
        shape = DraftShape(num_draft_tokens, tree or TreeShape())
        ids = None if draft is None else _aux_layer_ids(model, draft, aux_layer_ids)
        self.target = CachedTarget(model, ids)
        on_one_device = len({x.device for x in model.parameters()}) == 1
        self.passes = self.target.passes = Passes(
            self.target.device, record=record and on_one_device
        )
        self.strategy: Strategy | None = None
        if draft is not None and kind is not None:
            self.strategy = kind(draft, shape, dtype=draft_dtype, passes=self.passes)
            if draft.device != self.target.device:
                raise ValueError(
                    f"draft is on {draft.device}, the target on {self.target.device}: "
                    "move the draft there"
                )
        self._count = 0 if self.strategy is None else self.strategy.count
        self._max_kept = 1 if self.strategy is None else self.strategy.depth + 1
        self.timing = Timing([], 0.0)  # of the last `generate`

    @property
    def method(self) -> str | None:
        """The strategy's name; None without a draft."""
        return None if self.strategy is None else self.strategy.name

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        stops: Stops,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        on_round: Callable[[list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Continue all prompts as one batch, each at its own pace; `on_round` is called after every
        round."""
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if not prompts or not all(prompts):
            raise ValueError("prompts: at least one, and each of at least one token")
        if temperature < _COLDEST:
            temperature = 0.0
        generator = torch.Generator(self.target.device).manual_seed(seed) if temperature else None
        chooser = Chooser(temperature, generator)
        self.passes.begin(greedy=temperature == 0)
        clock = RoundClock(self.passes)
        texts = [Generation(list(prompt)) for prompt in prompts]
        batch = self._begin(texts, stops, chooser)
        while batch is not None:
            clock.mark()
            proposal = self._propose(batch, chooser)
            clock.mark()
            verdicts, aux_BND = self._verify(batch, proposal, chooser)
            for row, verdict in zip(batch.rows, verdicts, strict=True):
                if row.finish is not None:
                    continue
                if verdict.tokens[-1] == NO_TOKEN:
                    number = next(i for i, text in enumerate(texts) if text is row)
                    raise self._refusal(number, row, verdict.tokens[:-1])
                context, emitted = row.known, row.add(verdict.tokens, stops)
                if self.strategy is not None:
                    row.rounds.append(Round(context, min(len(verdict.path), emitted), emitted))
            batch = self._advance(batch.rows, [verdict.path for verdict in verdicts], aux_BND)
            clock.mark()
            if on_round is not None:
                on_round(texts)
        self.timing = clock.read()
        return texts

    def _begin(self, rows: list[Generation], stops: Stops, chooser: Chooser) -> "_Batch | None":
        """Read the prompts and append the first token of each answer, which is never drafted."""
        prompts = [row.prompt_ids for row in rows]
        output = self.target.begin(prompts, ahead=self._count + 1)
        first_B = chooser.pick_sound(output.logits_BNV[:, 0])
        for number, (row, token) in enumerate(zip(rows, first_B.tolist(), strict=True)):
            if token == NO_TOKEN:
                raise self._refusal(number, row, [])
            row.add([token], stops)
        if self.strategy is not None:
            self.strategy.start(prompts, output.aux_BND)
        last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        aux_BND = take(output.aux_BND, last_B1.to(self.target.device))
        if self.passes.fixed:  # as wide as it will be after every round
            aux_BND = F.pad(aux_BND, (0, 0, 0, self._max_kept - 1))
        return self._advance(rows, [[] for _ in rows], aux_BND)

    def _propose(self, batch: "_Batch", chooser: Chooser) -> Proposal:
        if self.strategy is None:
            return Proposal(batch.table_BX[:, :0])
        tensors = {"table_BX": batch.table_BX, "aux_BQD": batch.aux_BQD}
        return self.passes(
            propose, tensors, strategy=self.strategy, used=batch.draft_used, chooser=chooser
        )

    def _verify(
        self, batch: "_Batch", proposal: Proposal, chooser: Chooser
    ) -> tuple[list[Verdict], Tensor]:
        count, used = proposal.token_BN.shape[1], batch.target_used
        ends = {row.known + count for row in batch.rows}
        tensors = {"table_BX": batch.table_BX, "token_BN": proposal.token_BN}
        if proposal.parent_BN is not None:
            tensors["parent_BN"] = proposal.parent_BN
        verified = self.passes(
            verify,
            tensors,
            target=self.target,
            strategy=self.strategy,
            used=used,
            level=ends == {used} and not self.passes.fixed,
            drawn=proposal.probs_BNW is not None,
            chooser=chooser,
        )
        if verified.picks_BX is not None:
            return judge(verified.picks_BX.tolist(), count), verified.aux_BND
        assert verified.logits_BNV is not None
        assert self.strategy is not None
        selected_W = self.strategy.selected_W
        return judge_drawn(proposal, verified.logits_BNV, chooser, selected_W), verified.aux_BND

    def _refusal(self, number: int, row: Generation, accepted: Sequence[int]) -> NotFinite:
        """The error for non-finite numbers of the target after the known text."""
        known = len(row.prompt_ids) + len(row.token_ids) + len(accepted)
        fault = Fault("logits", number, known - 1)
        return refusal(fault, dtype=self.target.dtype)

    def _advance(
        self, rows: list[Generation], paths: Sequence[Sequence[int]], aux_BND: Tensor
    ) -> "_Batch | None":
        """Drop finished rows and what was not accepted; None when all rows are finished."""
        kept = self._rows_to_keep(rows)
        if not kept:
            return None
        places = [
            [0, *(node + 1 for node in path)] if row.finish is None else [0]
            for row, path in zip(rows, paths, strict=True)
        ]
        if len(kept) < len(rows):
            self.target.select(kept)
            rows, places = [rows[i] for i in kept], [places[i] for i in kept]
            aux_BND = aux_BND[torch.tensor(kept, device=aux_BND.device)]
            if self.strategy is not None:
                self.strategy.select(kept)
        table = [
            (row.known - 1, row.token_ids[-len(row_places) :], row_places)
            for row, row_places in zip(rows, places, strict=True)
        ]
        width = self._max_kept if self.passes.fixed else max(map(len, places))
        table_BX = send_rows(table, self.target.device, width=width)
        end = max(length for length, _, _ in table)
        target_used = self.target.room(end + 1 + self._count)
        if self.strategy is None:
            return _Batch(rows, table_BX, aux_BND, 0, target_used)
        used = self.strategy.reserve(end)
        aux_BQD = self.strategy.settle(self.target, table_BX, aux_BND, places)
        return _Batch(rows, table_BX, aux_BQD, used, target_used)

    def _rows_to_keep(self, rows: list[Generation]) -> list[int]:
        """Indices of the unfinished rows. With fixed shapes, enough finished rows stay that the
        number of rows is only ever halved: every batch then shrinks through the same sizes."""
        alive = [index for index, row in enumerate(rows) if row.finish is None]
        if not alive or not self.passes.fixed:
            return alive
        count = len(rows)
        while count // 2 >= len(alive):
            count //= 2
        finished = [index for index, row in enumerate(rows) if row.finish is not None]
        return sorted([*alive, *finished[: count - len(alive)]])


class _Batch(NamedTuple):
    """The rows between two rounds, and what the target's last pass verified."""

    rows: list[Generation]
    table_BX: Tensor  # see `decode.strategy`
    aux_BQD: Tensor
    draft_used: int  # entries of the strategy's cache that the next round reads
    target_used: int  # entries of the target's cache that it reads


@dataclass(frozen=True)
class Verified:
    """The target's output on a proposal."""

    aux_BND: Tensor
    picks_BX: Tensor | None = None  # for `judge`
    logits_BNV: Tensor | None = None  # for `judge_drawn`


# The passes that are recorded on a GPU: functions of their arguments alone.


def propose(
    table_BX: Tensor, aux_BQD: Tensor, *, strategy: Strategy, used: int, chooser: Chooser
) -> Proposal:
    return strategy.propose(RoundState(*Slots.of(table_BX), aux_BQD, used), chooser)


def verify(
    table_BX: Tensor,
    token_BN: Tensor,
    parent_BN: Tensor | None = None,
    *,
    target: CachedTarget,
    strategy: Strategy | None,
    used: int,
    level: bool,
    drawn: bool,
    chooser: Chooser,
) -> Verified:
    """Run the target over the newest known token and the proposed ones. `drawn`: the proposal was
    sampled from the draft, and rejection sampling needs the logits."""
    slots = Slots.of(table_BX)
    last_B1 = slots.token_BQ.gather(1, slots.count_B[:, None] - 1)
    read_BN = torch.cat([last_B1, token_BN.clamp_min(0)], dim=1)  # NO_TOKEN is never accepted
    layout = None if strategy is None else strategy.layout(parent_BN)
    output = target.read(read_BN, slots.length_B, used=used, layout=layout, level=level)
    if drawn:
        return Verified(output.aux_BND, logits_BNV=output.logits_BNV)
    picks_BX = pack_picks(Proposal(token_BN, parent_BN), output.logits_BNV, chooser)
    return Verified(output.aux_BND, picks_BX=picks_BX)


def _aux_layer_ids(
    model: nn.Module, draft: DraftModel, requested: Sequence[int] | None
) -> list[int]:
    """The aux layers that a draft reads: as requested, as it was trained, or the default ones."""
    depth, count = target_depth(model.config), draft.config.num_aux_hidden_states
    trained = getattr(draft.config, "aux_layer_ids", None)
    ids = requested or trained or method_of(draft.config).default_layers(depth, count)
    return validate_aux_layer_ids(ids, depth, count)
