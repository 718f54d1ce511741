"""A strategy: everything in decoding that depends on how tokens are drafted.

The engine (`decode.speculative`) passes it the prompts and the target's states of them, and in each
round the slots verified since the last one. The strategy proposes tokens and determines how the
target reads them. Shapes: B rows, T prompt tokens, N proposed tokens, Q verified slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.errors import BadInput, nearest
from fledge.core.rows import TokenBatch
from fledge.core.transfer import send
from fledge.decode.accept import Chooser, Proposal
from fledge.decode.recorded import Passes
from fledge.decode.target import CachedTarget, Layout
from fledge.methods.registry import METHODS, method_of
from fledge.methods.shared.draft import DraftModel
from fledge.rollout.plan import RolloutPlan, plan_rollout
from fledge.rollout.slots import RowMasks

# --- shape ---------------------------------------------------------------------------------------
# How much a round drafts.


@dataclass(frozen=True)
class TreeShape:
    depth: int = 5
    width: int = 4
    nodes: int = 24

    def __post_init__(self) -> None:
        for name in ("depth", "width", "nodes"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} of a tree must be positive, got {getattr(self, name)}")

    def proposed(self, vocabulary: int) -> int:
        """The number of nodes proposed: `nodes`, or all scored nodes if there are fewer."""
        width = min(self.width, vocabulary)
        return min(self.nodes, width + (self.depth - 1) * width**2)

    def behind(self, vocabulary: int) -> int:
        """The number of entries that expanded nodes take in the draft's cache, after the anchor."""
        return (self.depth - 1) * min(self.width, vocabulary)


@dataclass(frozen=True)
class DraftShape:
    """What a user requests; each strategy uses its part of it."""

    num_draft_tokens: int = 7  # without a tree
    tree: TreeShape = TreeShape()

    def __post_init__(self) -> None:
        if self.num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens must be positive, got {self.num_draft_tokens}")


# --- state ---------------------------------------------------------------------------------------
# Which slots the target verified last, and its states there: what lies between two rounds.
#
# Slot t is the target's aux states at token t together with token t + 1. A round that accepts n
# tokens verifies n + 1 slots: that of the token it started from, and those of the accepted ones.
#
# What the host sends to the device in a round is one table with a row of X = 2 + 2Q numbers for
# each text: one copy, one input of a pass. Its Q slots are left-aligned, as many as the longest
# row has or, where shapes stay fixed, can have.


@dataclass(frozen=True)
class RoundState:
    """What a strategy drafts from: everything verified since it last drafted."""

    length_B: Tensor  # tokens in the target's cache: all that are known but the newest
    count_B: Tensor  # how many of the Q slots are real
    token_BQ: Tensor  # the token after each slot's own; the last real one is the newest of all
    place_BQ: Tensor  # index of each slot's own token in the target's last pass
    aux_BQD: Tensor  # the target's states at the slots' own tokens
    used: int  # entries of the strategy's cache to read: what its `reserve` returned

    @property
    def start_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's first new slot."""
        return self.length_B - self.count_B

    @property
    def anchor_B(self) -> Tensor:  # noqa: N802  (its shape)
        """Each row's last slot: where its rollout starts."""
        return self.length_B - 1


def send_rows(
    rows: Iterable[tuple[int, Sequence[int], Sequence[int]]], device: torch.device, *, width: int
) -> Tensor:
    """Send a table of rows (length, tokens, places), of up to `width` slots each, in one copy."""
    table = []
    for length, tokens, places in rows:
        count = len(tokens)
        padding = [0] * (width - count)
        table.append([length, count, *tokens, *padding, *places, *range(count, width)])
    return send(torch.tensor(table), device)


class Slots(NamedTuple):
    """The columns of such a table: the first four fields of a `RoundState`."""

    length_B: Tensor
    count_B: Tensor
    token_BQ: Tensor
    place_BQ: Tensor

    @classmethod
    def of(cls, table_BX: Tensor) -> "Slots":
        token_BQ, place_BQ = table_BX[:, 2:].chunk(2, dim=1)
        return cls(table_BX[:, 0], table_BX[:, 1], token_BQ, place_BQ)


# --- rollouts ------------------------------------------------------------------------------------
# The teacher-forced counterpart of a strategy: what it would draft from every slot of a text.
#
# Texts are packed as in training; the loss mask marks the answers. Slot t reads token t + 1 and
# drafts token t + 2, so the slots that count are those whose next two tokens belong to one answer:
# the first token of an answer comes from the prompt's pass.
#
#     token            p p p a a a a p p        p prompt, a answer
#     slot drafts      . . a a a . . . .        (tokens 4, 5, 6)
#
# Shapes: N rollout elements.


def drafting_slots(tokens: TokenBatch) -> Tensor:
    """[B, T] bool: slots that draft a token of an answer."""
    loss_BT = F.pad(tokens.loss_mask, (0, 2)).bool()
    assert tokens.doc_remaining is not None
    return loss_BT[:, 1:-1] & loss_BT[:, 2:] & (tokens.doc_remaining >= 2)


def _selected(draft: Any) -> Tensor:
    """Target ids of the draft's tokens."""
    selected: Tensor | None = draft.selected_token_ids
    if selected is None:
        raise ValueError("d2t: the draft has no vocabulary mapping")
    return selected


@dataclass(frozen=True)
class Rollouts(ABC):
    """Rollouts of the draft from all slots at once, `depths` tokens long."""

    draft: Any  # of the strategy's kind
    depths: int
    dtype: torch.dtype | None = None

    @property
    def selected_token_ids(self) -> Tensor:
        return _selected(self.draft)

    def plan(self, tokens: TokenBatch) -> RolloutPlan:
        """A plan in which every drafting slot starts a rollout, up to the end of its answer."""
        masks = RowMasks.of(tokens, drafting_slots(tokens))
        return plan_rollout(masks, num_depths=self.depths, device=self.draft.device)

    def head_inputs(self, batch: Eagle3TargetBatch, plan: RolloutPlan) -> Sequence[Tensor]:
        """[N, E] per depth, in the plan's order of rows."""
        aux_TD = plan.on_key_axis(batch.aux_hidden_states.to(self.draft.device))
        ids_T = plan.on_key_axis(batch.input_ids.to(self.draft.device))
        return self.unroll(aux_TD, ids_T, plan)

    @abstractmethod
    def unroll(self, aux_TD: Tensor, ids_T: Tensor, plan: RolloutPlan) -> Sequence[Tensor]:
        """[N, E] per depth; aux states and next tokens lie on the plan's key axis."""

    def logits(self, head_input_NE: Tensor) -> Tensor:
        """[N, W] the draft's logits."""
        return F.linear(head_input_NE, self.draft.lm_head.weight.to(head_input_NE.dtype))


# --- strategy -------------------------------------------------------------------------------------


class Strategy(ABC):
    """One way of drafting with one draft, for one batch of rows at a time. A new one is a subclass
    that a method lists under `strategies`; what it caches of a text is up to it.
    `decode.drafter.UnrolledStrategy` is the base of those that run the draft token by token."""

    drafted: ClassVar[str]
    """What a round drafts in a word, for the title of a table: "chain". `label` is the whole
    phrase."""

    rollouts: ClassVar[type[Rollouts] | None] = None
    """Its teacher-forced counterpart, for exact replay; None: it has to be decoded live."""

    def __init__(
        self,
        draft: DraftModel,
        shape: DraftShape,
        *,
        dtype: torch.dtype | None = None,
        passes: Passes | None = None,
    ) -> None:
        self.draft, self.shape, self.dtype = draft.eval(), shape, dtype or draft.dtype
        self.selected_W = _selected(draft)
        self.passes = passes or Passes(draft.device, record=False)

    # --- what it is -----------------------------------------------------------------------------

    @classmethod
    def fits(cls, draft: DraftModel) -> bool:
        """Whether it can use this draft, whose method is known to list the strategy."""
        return True

    @property
    def name(self) -> str:
        """Its name in the draft's method."""
        strategies = method_of(self.draft.config).strategies
        return next(name for name in strategies if strategies[name] is type(self))

    @property
    @abstractmethod
    def count(self) -> int:
        """Tokens that a round proposes."""

    @property
    def depth(self) -> int:
        """The most of them that can be accepted."""
        return self.count

    @property
    @abstractmethod
    def label(self) -> str:
        """What a round drafts, for the sentence that goes with a figure."""

    # --- its cache of the texts -----------------------------------------------------------------
    # Empty bodies on purpose (B027): a strategy may cache nothing.

    def start(self, prompts: Sequence[Sequence[int]], aux_BTD: Tensor) -> None:  # noqa: B027
        """Start new texts, given the prompts and the target's left-aligned states of their tokens.

        The last slot of a prompt still lacks its token, which the first round provides.
        """

    def reserve(self, end: int) -> int:
        """Make room for a round after `end` slots; returns how many entries of the cache its pass
        reads (`RoundState.used`)."""
        return 0

    def select(self, rows: Sequence[int]) -> None:  # noqa: B027
        """Keep these rows only, moved to the front."""

    # --- a round --------------------------------------------------------------------------------

    @abstractmethod
    def propose(self, state: RoundState, chooser: Chooser) -> Proposal:
        """Process the verified slots and draft tokens after them.

        Plain tensor code that may be recorded (`decode.recorded`): it must not read a tensor's
        values on the host, and must give the same result when it is run again on the same state.
        `count` tokens are drafted and verified in any case. A strategy that would rather stop
        proposes NO_TOKEN from there on (sampling: probabilities of 0; `Rollouts.logits`: -inf in
        the whole row), as DSpark's does below its confidence threshold.
        """

    def layout(self, parent_BN: Tensor | None) -> Layout | None:
        """How the target reads the newest known token and the proposed ones; None: in sequence."""
        return None

    def settle(
        self,
        target: CachedTarget,
        table_BX: Tensor,
        aux_BND: Tensor,
        places: Sequence[Sequence[int]],
    ) -> Tensor:
        """Move accepted tokens to their places in the target's cache, and return their aux states
        [B, Q, D].

        `places`: indices of each row's accepted tokens in the target's last pass.
        """
        return aux_BND[:, : table_BX.shape[1] // 2 - 1]


# --- choice ---------------------------------------------------------------------------------------
# Which strategy a draft is decoded with, of those that its method lists.


def check_name(name: str) -> None:
    known = {name for method in METHODS.values() for name in method.strategies}
    if name not in known:
        raise BadInput(f"no strategy is named '{name}'", fix=nearest(name, sorted(known)))


def choose(draft: DraftModel, name: str | None = None) -> type[Strategy]:
    """The named strategy, if it fits the draft; None selects the one the draft was trained for."""
    method = method_of(draft.config)
    name, strategies = name or method.own_strategy, method.strategies
    check_name(name)
    if name not in strategies or not strategies[name].fits(draft):
        others = [other for other in strategies if other != name]
        raise BadInput(
            f"this draft was not trained for {name} drafting", fix=f"use {' or '.join(others)}"
        )
    return strategies[name]


def fitting(draft: DraftModel) -> list[str]:
    """The names of all strategies that a draft can be decoded with, its own first."""
    strategies = method_of(draft.config).strategies
    return [name for name, strategy in strategies.items() if strategy.fits(draft)]


def rollouts_of(
    draft: DraftModel,
    num_draft_tokens: int,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
) -> Rollouts:
    """The teacher-forced counterpart of a draft's strategy; without a name, of one that can be
    replayed."""
    kind = choose(draft, name or method_of(draft.config).replayed_strategy)
    strategy = kind(draft, DraftShape(num_draft_tokens))
    if strategy.rollouts is None:
        raise BadInput(f"method: {strategy.name} drafting cannot be replayed", fix="decode live")
    return strategy.rollouts(draft, strategy.depth, dtype)
