"""Speculative generation: draft, verify, take back, again. The text is the target's own.

One round: the draft runs the slots that the last round verified, with the target's true features,
and proposes tokens; the target reads the last known token and all proposed ones in one pass; the
accepted ones and one token of the target's own are added; both caches forget the rest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fledge.core.errors import BadInput, nearest
from fledge.core.transfer import send
from fledge.decode.accept import Verdict, judge, judge_drawn, told
from fledge.decode.clock import Clock
from fledge.decode.drafter import Drafter, TrueSlots
from fledge.decode.propose import Chooser, Proposal, propose_chain, propose_parallel
from fledge.decode.recorded import Passes
from fledge.decode.rounds import Round
from fledge.decode.stops import Finish, Stops
from fledge.decode.target import CachedTarget, take
from fledge.decode.tree import TreeShape, propose_tree, tree_layout
from fledge.draft.eagle3 import LlamaEagle3DraftModel
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
    draft_s: float = 0.0
    target_s: float = 0.0
    recording_s: float = 0.0  # in none of the above: a GPU's passes are recorded once


class SpeculativeDecoder:
    """A Hugging Face target with a draft, or, for comparison, without one.

    `method` None takes what the draft was trained for. `num_draft_tokens` is the length of a chain,
    or the number of parallel tokens; a tree has its own shape. `record`: whether greedy decoding on
    a GPU runs recorded passes (`recorded`).
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
        record: bool = True,
    ) -> None:
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
        self.passes = self.target.passes = Passes(self.target.device, record=record)
        self.drafter: Drafter | None = None
        if draft is not None:
            self.drafter = Drafter(draft, dtype=draft_dtype, passes=self.passes)
            if self.drafter.device != self.target.device:
                raise ValueError(
                    f"draft is on {self.drafter.device}, the target on {self.target.device}: "
                    "move the draft there"
                )
        self._reach = _Reach.of(self.method, num_draft_tokens, self.tree, self.drafter)
        self.timing = Timing()

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
        """Continue every prompt, all at once, each at its own pace; `on_round` may watch."""
        if not temperature >= 0:
            raise ValueError(f"temperature must not be negative, got {temperature}")
        if not prompts or not all(prompts):
            raise ValueError("prompts: at least one, and each of at least one token")
        generator = torch.Generator(self.target.device).manual_seed(seed) if temperature else None
        chooser = Chooser(temperature, generator)
        self.passes.begin(greedy=temperature == 0)
        clock = Clock(self.target.device)
        everyone = [Generation(list(prompt)) for prompt in prompts]
        now = self._begin(everyone, stops, chooser)
        self.timing = Timing()
        while now is not None:
            clock.mark(self.passes.recording_s)
            proposal = self._propose(now, chooser)
            clock.mark(self.passes.recording_s)
            verdicts, aux_BND = self._verify(now, proposal, chooser)
            for row, verdict in zip(now.rows, verdicts, strict=True):
                self._add(row, verdict, stops)
            now = self._go_on(now.rows, [verdict.path for verdict in verdicts], aux_BND)
            clock.mark(self.passes.recording_s)
            self.timing.rounds += 1
            if on_round is not None:
                on_round(everyone)
        self.timing.draft_s, self.timing.target_s, self.timing.decode_s = clock.read()
        self.timing.recording_s = self.passes.recording_s
        return everyone

    def _begin(self, rows: list[Generation], stops: Stops, chooser: Chooser) -> "_Now | None":
        """Read the prompts and take the first token, which no draft had a say in."""
        prompts = [row.prompt_ids for row in rows]
        answer = self.target.begin(prompts, ahead=self._reach.count + 1)
        first_B, _ = chooser.pick(answer.logits_BNV[:, 0])
        for row, token in zip(rows, first_B.tolist(), strict=True):
            row.add([token], stops)
        aux_BND = None
        if self.drafter is not None and answer.aux_BND is not None:
            self.drafter.start(len(rows))
            self._read_prompts(self.drafter, prompts, answer.aux_BND)
            last_B1 = torch.tensor([[len(prompt) - 1] for prompt in prompts])
            aux_BND = take(answer.aux_BND, last_B1.to(self.target.device))
            if self.passes.fixed:  # as wide as it will be after every round
                aux_BND = F.pad(aux_BND, (0, 0, 0, self._reach.kept - 1))
        return self._go_on(rows, [[] for _ in rows], aux_BND)

    @staticmethod
    def _read_prompts(drafter: Drafter, prompts: list[list[int]], aux_BTD: Tensor) -> None:
        """The prompts' slots, but for the last, which reads the first token behind the prompt."""
        width = max(len(prompt) for prompt in prompts) - 1
        if width > 0:
            tokens = [prompt[1:] + [0] * (width + 1 - len(prompt)) for prompt in prompts]
            token_BQ = torch.tensor(tokens, device=drafter.device)
            index_BQ = torch.arange(width, device=drafter.device).expand(token_BQ.shape)
            state_BQE = drafter.draft.project_hidden_states(aux_BTD[:, :width], drafter.dtype)
            drafter.room(width)
            drafter.run(state_BQE, token_BQ, index_BQ, used=width)

    def _numbers(self, rows: list[Generation], kept: list[list[int]]) -> Tensor:
        """[B, 2 + 2Q]: all that a round tells the device, in one copy.

        Length of the row in the target's cache; how many slots the last round made true, the tokens
        that they read, and where among the last round's tokens they stood.
        """
        most = self._reach.kept if self.passes.fixed else max(len(own) for own in kept)
        table = []
        for row, own in zip(rows, kept, strict=True):
            count, rest = len(own), most - len(own)
            tokens = row.token_ids[-count:]
            table.append([row.known - 1, count, *tokens, *[0] * rest, *own, *range(count, most)])
        return send(torch.tensor(table), self.target.device)

    def _propose(self, now: "_Now", chooser: Chooser) -> Proposal:
        drafter = self.drafter
        if drafter is None or now.aux_BQD is None:
            return Proposal(now.numbers_BC[:, :0])
        used = now.draft_used

        def run(numbers_BC: Tensor, aux_BQD: Tensor) -> Proposal:
            length_B, count_B, token_BQ, _ = _columns(numbers_BC)
            slots = TrueSlots(aux_BQD, token_BQ, length_B - count_B, count_B, used)
            if self.method == "tree":
                return propose_tree(drafter, slots, self.tree)
            propose = propose_parallel if self.method == "parallel" else propose_chain
            return propose(drafter, slots, self.num_draft_tokens, chooser)

        inputs = {"numbers_BC": now.numbers_BC, "aux_BQD": now.aux_BQD}
        return self.passes("propose", run, inputs, used=used)

    def _verify(
        self, now: "_Now", proposal: Proposal, chooser: Chooser
    ) -> tuple[list[Verdict], Tensor | None]:
        count, used = proposal.token_BN.shape[1], now.target_used
        ends = {row.known + count for row in now.rows}
        level = ends == {used} and not self.passes.fixed

        def run(numbers_BC: Tensor, **proposed: Tensor) -> "_Verified":
            length_B, count_B, token_BQ, _ = _columns(numbers_BC)
            last_B1 = token_BQ.gather(1, count_B[:, None] - 1)
            token_BN = torch.cat([last_B1, proposed["token_BN"]], dim=1)
            layout = {}
            if "parent_BN" in proposed:
                depth_BN, visible_BNN = tree_layout(proposed["parent_BN"], self.tree.depth)
                layout = {"depth_BN": depth_BN, "visible_BNN": visible_BNN}
            answer = self.target.read(token_BN, length_B, used=used, level=level, **layout)
            if proposal.probs_BNW is not None:
                return _Verified(answer.aux_BND, logits_BNV=answer.logits_BNV)
            own = Proposal(proposed["token_BN"], proposed.get("parent_BN"))
            return _Verified(answer.aux_BND, told_BK=told(own, answer.logits_BNV, chooser))

        inputs = {"numbers_BC": now.numbers_BC, "token_BN": proposal.token_BN}
        if proposal.parent_BN is not None:
            inputs["parent_BN"] = proposal.parent_BN
        found = self.passes("verify", run, inputs, used=used)
        if found.told_BK is not None:
            return judge(found.told_BK.tolist(), count), found.aux_BND
        assert found.logits_BNV is not None
        assert self.drafter is not None
        drawn = judge_drawn(proposal, found.logits_BNV, chooser, self.drafter.selected_W)
        return drawn, found.aux_BND

    def _settle(self, numbers_BC: Tensor) -> None:
        """Move the accepted path of the last tree together in the target's cache."""

        def run(numbers_BC: Tensor) -> None:
            length_B, count_B, _, place_BQ = _columns(numbers_BC)
            self.target.settle(length_B - count_B, place_BQ)

        def rehearse() -> dict[str, Tensor]:
            """Everything stays where it is: moved twice, it would be elsewhere."""
            rehearsal_BC = numbers_BC.clone()
            _, _, _, place_BQ = _columns(rehearsal_BC)
            place_BQ.copy_(torch.arange(place_BQ.shape[1], device=place_BQ.device))
            return {"numbers_BC": rehearsal_BC}

        inputs = {"numbers_BC": numbers_BC}
        self.passes("settle", run, inputs, used=0, rehearse=rehearse)

    def _add(self, row: Generation, verdict: Verdict, stops: Stops) -> None:
        if row.finish is None:
            context = row.known
            emitted = row.add(verdict.tokens, stops)
            if self.drafter is not None:
                row.rounds.append(Round(context, min(len(verdict.path), emitted), emitted))

    def _go_on(
        self, rows: list[Generation], paths: Sequence[Sequence[int]], aux_BND: Tensor | None
    ) -> "_Now | None":
        """Drop finished rows (none left: None), and forget what was not accepted.

        Where shapes should stay as they are, finished rows run along until they are half of all.
        """
        alive = [index for index, row in enumerate(rows) if row.finish is None]
        if not alive:
            return None
        kept = [
            [0, *(node + 1 for node in path)] if row.finish is None else [0]
            for row, path in zip(rows, paths, strict=True)
        ]
        if len(alive) < len(rows) and not (self.passes.fixed and 2 * len(alive) > len(rows)):
            self.target.select(alive)
            rows, kept = [rows[i] for i in alive], [kept[i] for i in alive]
            if self.drafter is not None and aux_BND is not None:
                self.drafter.select(alive)
                aux_BND = aux_BND[torch.tensor(alive, device=aux_BND.device)]
        numbers_BC = self._numbers(rows, kept)
        end = max(row.known for row in rows) - 1  # in the caches, which lack the newest token
        target_used = self.target.room(end + 1 + self._reach.count)
        if self.drafter is None or aux_BND is None:
            return _Now(rows, numbers_BC, target_used)
        draft_used = self.drafter.room(end + self._reach.slots)
        place_BQ = _columns(numbers_BC)[3]
        if self.method != "tree":  # what stands, stands where it should
            aux_BQD = aux_BND[:, : place_BQ.shape[1]]
        else:
            aux_BQD = take(aux_BND, place_BQ)
            if self.passes.fixed or any(own != [*range(len(own))] for own in kept):
                self._settle(numbers_BC)
        return _Now(rows, numbers_BC, target_used, draft_used, aux_BQD)


@dataclass(frozen=True)
class _Now:
    """Between two rounds: the rows, and what is true since the last pass of the target."""

    rows: list[Generation]
    numbers_BC: Tensor
    target_used: int  # how far the next round looks in the caches
    draft_used: int = 0
    aux_BQD: Tensor | None = None  # None without a draft


@dataclass(frozen=True)
class _Verified:
    aux_BND: Tensor | None
    told_BK: Tensor | None = None
    logits_BNV: Tensor | None = None  # of a chain that was drawn


@dataclass(frozen=True)
class _Reach:
    """How much a round can bring, whatever is accepted."""

    count: int = 0  # proposed tokens
    kept: int = 1  # places of the target's pass that can stand
    slots: int = 0  # entries of the draft's cache behind the newest verified slot

    @classmethod
    def of(
        cls, method: Method | None, count: int, tree: TreeShape, drafter: Drafter | None
    ) -> "_Reach":
        if drafter is None:
            return cls()
        if method == "tree":
            vocabulary = len(drafter.selected_W)
            kept = tree.depth + 1
            return cls(tree.proposed(vocabulary), kept, max(kept, tree.behind(vocabulary)))
        return cls(count, count + 1, 2 * count if method == "parallel" else count + 1)


def _columns(numbers_BC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lengths, counts, tokens and places of `_numbers`."""
    token_BQ, place_BQ = numbers_BC[:, 2:].chunk(2, dim=1)
    return numbers_BC[:, 0], numbers_BC[:, 1], token_BQ, place_BQ


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
    return cast(Method, method)
