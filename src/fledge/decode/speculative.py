"""Speculative generation: draft, verify, take back, again. The text is the target's own.

One round: the draft runs the slots that the last round verified, with the target's true features,
and proposes tokens; the target reads the last known token and all proposed ones in one pass; the
accepted ones and one token of the target's own are added; both caches forget the rest.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import nn

from fledge.decode.accept import Verdict, judge
from fledge.decode.drafter import Drafter, TrueSlots
from fledge.decode.propose import Chooser, Proposal, propose_chain, propose_parallel
from fledge.decode.rounds import Round
from fledge.decode.stops import Finish, Stops
from fledge.decode.target import Answer, CachedTarget, take
from fledge.decode.tree import TreeShape, propose_tree, tree_layout
from fledge.draft.model import LlamaEagle3DraftModel
from fledge.errors import BadInput, nearest
from fledge.target.layers import default_aux_layer_ids, target_depth, validate_aux_layer_ids

Method = Literal["chain", "parallel", "tree"]


@dataclass
class Generation:
    """One prompt's continuation, and how it came about."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)  # new ones only, the ending token included
    finish: Finish | None = None
    rounds: list[Round] = field(default_factory=list)  # empty without a draft

    @property
    def known(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)

    def tokens_from(self, index: int) -> list[int]:
        """Prompt and continuation laid end to end, from `index` on."""
        prompt = len(self.prompt_ids)
        return self.prompt_ids[index:] + self.token_ids[max(0, index - prompt) :]

    def add(self, tokens: Sequence[int], stops: Stops) -> int:
        """Append up to where the text ends; how many were taken."""
        before = len(self.token_ids)
        count, self.finish = stops.cut([*self.token_ids, *tokens], before)
        self.token_ids += tokens[: count - before]
        return count - before


@dataclass
class Timing:
    """Where the time of one `generate` went after the prompts were read."""

    rounds: int = 0  # passes of the target; a batch counts once
    decode_s: float = 0.0
    draft_s: float = 0.0  # this and the next only when measured: a GPU must be waited for
    target_s: float = 0.0


class SpeculativeDecoder:
    """A Hugging Face target with a draft, or, for comparison, without one.

    `method` None takes what the draft was trained for. `num_draft_tokens` is the length of a chain,
    or the number of parallel tokens; a tree has its own shape.
    """

    def __init__(
        self,
        model: nn.Module,
        draft: LlamaEagle3DraftModel | None = None,
        *,
        aux_layer_ids: Sequence[int] | None = None,
        method: Method | None = None,
        num_draft_tokens: int = 7,
        tree: TreeShape | None = None,
        draft_dtype: torch.dtype | None = None,
    ) -> None:
        self.drafter = None if draft is None else Drafter(draft, dtype=draft_dtype)
        self.method = None if draft is None else check_method(draft, method)
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be positive, got {num_draft_tokens}")
        self.num_draft_tokens = num_draft_tokens
        self.tree = tree or TreeShape()
        ids: list[int] | None = None
        if draft is not None:
            depth = target_depth(model.config)
            known = getattr(draft.config, "aux_layer_ids", None)  # what it was trained on
            ids = validate_aux_layer_ids(
                aux_layer_ids or known or default_aux_layer_ids(depth), depth
            )
        self.target = CachedTarget(model, ids)
        if self.drafter is not None and self.drafter.device != self.target.device:
            raise ValueError(
                f"draft is on {self.drafter.device}, the target on {self.target.device}: "
                "move the draft there"
            )
        if self.method == "tree":
            self.target.check_trees()
        self.timing = Timing()

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        stops: Stops,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        measure: bool = False,
        on_round: Callable[[list[Generation]], None] | None = None,
    ) -> list[Generation]:
        """Continue every prompt, all at once, each at its own pace; `on_round` may watch."""
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if not prompts or not all(prompts):
            raise ValueError("prompts: at least one, and each of at least one token")
        generator = torch.Generator(self.target.device).manual_seed(seed) if temperature else None
        chooser = Chooser(temperature, generator)
        clock = _Clock(self.target.device, measure=measure)
        self.timing = Timing()
        everyone = [Generation(list(prompt)) for prompt in prompts]
        rows, slots = self._begin(everyone, stops, chooser)
        begin = clock.now(wait=True)
        while rows:
            round_begin = clock.now()
            proposal = self._propose(len(rows), slots, chooser)
            drafted = clock.now()
            answer, verdicts = self._verify(rows, proposal, chooser)
            tokens = proposal.token_BN.tolist()
            for row, drafted_N, verdict in zip(rows, tokens, verdicts, strict=True):
                self._add(row, [drafted_N[node] for node in verdict.path], verdict.token, stops)
            rows, slots = self._go_on(rows, verdicts, answer)
            self.timing.draft_s += drafted - round_begin
            self.timing.target_s += clock.now() - drafted
            self.timing.rounds += 1
            if on_round is not None:
                on_round(everyone)
        self.timing.decode_s = clock.now(wait=True) - begin
        return everyone

    def _begin(
        self, rows: list[Generation], stops: Stops, chooser: Chooser
    ) -> tuple[list[Generation], TrueSlots | None]:
        """Read the prompts and take the first token, which no draft had a say in."""
        answer = self.target.begin([row.prompt_ids for row in rows])
        first_B, _ = chooser.pick(answer.logits_BNV[:, 0])
        for row, token in zip(rows, first_B.tolist(), strict=True):
            row.add([token], stops)
        if self.drafter is not None:
            self.drafter.start(len(rows))
        alive = [index for index, row in enumerate(rows) if row.finish is None]
        self.target.keep(alive, [[] for _ in alive])
        everything = [list(range(len(rows[index].prompt_ids))) for index in alive]
        return [rows[i] for i in alive], self._slots(rows, alive, everything, answer)

    def _propose(self, batch: int, slots: TrueSlots | None, chooser: Chooser) -> Proposal:
        if self.drafter is None or slots is None:
            return Proposal(torch.empty((batch, 0), dtype=torch.long, device=self.target.device))
        if self.method == "tree":
            return propose_tree(self.drafter, slots, self.tree)
        propose = propose_parallel if self.method == "parallel" else propose_chain
        return propose(self.drafter, slots, self.num_draft_tokens, chooser)

    def _verify(
        self, rows: list[Generation], proposal: Proposal, chooser: Chooser
    ) -> tuple[Answer, list[Verdict]]:
        last_B1 = torch.tensor([row.token_ids[-1:] for row in rows], device=self.target.device)
        token_BN = torch.cat([last_B1, proposal.token_BN], dim=1)
        if proposal.parent_BN is None:
            answer = self.target.step(token_BN)
        else:
            depth_BN, visible_BNN = tree_layout(proposal.parent_BN, self.tree.depth)
            answer = self.target.step(token_BN, depth_BN=depth_BN, visible_BNN=visible_BNN)
        selected_W = token_BN.new_empty(0) if self.drafter is None else self.drafter.selected_W
        return answer, judge(proposal, answer.logits_BNV, chooser, selected_W)

    def _add(self, row: Generation, drafted: list[int], own: int, stops: Stops) -> None:
        context = row.known
        emitted = row.add([*drafted, own], stops)
        if self.drafter is not None:
            row.rounds.append(Round(context, min(len(drafted), emitted), emitted))

    def _go_on(
        self, rows: list[Generation], verdicts: list[Verdict], answer: Answer
    ) -> tuple[list[Generation], TrueSlots | None]:
        """Drop finished rows, and of the others everything that was not accepted."""
        alive = [index for index, row in enumerate(rows) if row.finish is None]
        kept = [[0, *(node + 1 for node in verdicts[index].path)] for index in alive]
        self.target.keep(alive, kept)
        return [rows[i] for i in alive], self._slots(rows, alive, kept, answer)

    def _slots(
        self, rows: list[Generation], alive: list[int], kept: list[list[int]], answer: Answer
    ) -> TrueSlots | None:
        """The slots that the target's answer has made true; `kept` are its places that stand."""
        if self.drafter is None or answer.aux_BND is None or not alive:
            return None
        self.drafter.select(alive)
        width = max(len(own) for own in kept)
        place = [own + [0] * (width - len(own)) for own in kept]
        aux_BND = answer.aux_BND[torch.tensor(alive, device=self.target.device)]
        aux_BQD = take(aux_BND, torch.tensor(place, device=self.target.device))
        # the newest token has no state yet: a row's last slot is the one before
        start_B = [rows[i].known - 1 - len(own) for i, own in zip(alive, kept, strict=True)]
        tokens = [rows[i].tokens_from(start + 1) for i, start in zip(alive, start_B, strict=True)]
        padded = [own + [0] * (width - len(own)) for own in tokens]
        return TrueSlots(
            aux_BQD=aux_BQD.to(self.drafter.device),
            token_BQ=torch.tensor(padded, device=self.drafter.device),
            start_B=start_B,
            count_B=[len(own) for own in kept],
        )


class _Clock:
    """Wall clock that waits for the GPU, always or only where it is asked to."""

    def __init__(self, device: torch.device, *, measure: bool) -> None:
        self._cuda = device if device.type == "cuda" else None
        self._measure = measure

    def now(self, *, wait: bool = False) -> float:
        if self._cuda is not None and (wait or self._measure):
            torch.cuda.synchronize(self._cuda)
        return time.perf_counter()


def check_method(draft: LlamaEagle3DraftModel, method: str | None) -> Method:
    """What was asked for, if the draft can do it; None: what it was trained for."""
    config = draft.config
    if method is None:
        return "parallel" if config.parallel_drafting else "chain"
    if method not in get_args(Method):
        raise BadInput(
            f"no drafting method '{method}'", fix=nearest(method, list(get_args(Method)))
        )
    if method == "parallel" and (not config.parallel_drafting or config.mask_token_id is None):
        raise BadInput("this draft was not trained for parallel drafting", fix="use chain or tree")
    checked: Method = method  # type: ignore[assignment]
    return checked
