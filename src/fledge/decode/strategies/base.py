"""A strategy: everything in decoding that depends on how tokens are drafted.

The engine (`decode.speculative`) runs rounds. Before the first it passes the strategy the prompts
and the target's states of them (`start`); in every round, the slots verified since the last one
(`RoundState`). The strategy proposes tokens, and determines how the target reads them and which of
the target's states remain when some are accepted. What it keeps of a text, and where, is up to it:
a cache of keys and values, something else, or nothing.

A new strategy is a subclass that a method lists under `strategies`.

Shapes: B rows, T prompt tokens, N proposed tokens, Q verified slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fledge.decode.proposal import Chooser, Proposal
from fledge.decode.recorded import Passes
from fledge.decode.state import RoundState
from fledge.decode.strategies.rollouts import Rollouts
from fledge.decode.strategies.shape import DraftShape
from fledge.decode.target import CachedTarget, Layout
from fledge.draft.base import DraftModel
from fledge.methods.registry import method_of


class Strategy(ABC):
    """One way of drafting with one draft, for one batch of rows at a time."""

    drafted: ClassVar[str]
    """What a round drafts, for the title of a table: "chain"."""

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
        selected = draft.selected_token_ids
        if selected is None:
            raise ValueError("d2t: the draft has no vocabulary mapping")
        self.draft, self.shape, self.dtype = draft.eval(), shape, dtype or draft.dtype
        self.selected_W = selected  # target ids of the draft's tokens
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
