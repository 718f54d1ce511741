"""Calibration of a draft's confidence: temperatures by depth, and how much they help.

What decides how far a block is worth verifying is the probability that all tokens so far are
accepted, a running product. So temperatures are fitted depth by depth, each given those before it,
such that the product is calibrated on held-out texts. Shapes: N slots of a depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.measure.replay import Ints, Text, accepted_lengths, as_pack, ask, packs_of, target_picks
from fledge.methods.block.decoding import StepRollouts
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.shared.draft import DraftModel
from fledge.target.base import Eagle3TargetBackend

Floats = NDArray[np.float64]

_COLDEST, _HOTTEST = 0.05, 20.0
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Sureness:
    """Per drafting slot: log-odds by depth (NaN past the end of its text), and tokens accepted."""

    odds_NK: Floats
    accepted_N: Ints

    def stood(self, depth: int) -> NDArray[np.bool_]:
        """[N]: whether all tokens up to this depth were accepted."""
        return self.accepted_N > depth

    def at(self, temperatures: Sequence[float]) -> "Sureness":
        """The same with every depth's log-odds divided by its temperature, by default 1."""
        scale = np.ones(self.odds_NK.shape[1])
        scale[: len(temperatures)] = temperatures[: len(scale)]
        return Sureness(self.odds_NK / scale, self.accepted_N)

    @classmethod
    def joined(cls, parts: Sequence["Sureness"]) -> "Sureness":
        odds_NK = np.concatenate([part.odds_NK for part in parts])
        return cls(odds_NK, np.concatenate([part.accepted_N for part in parts]))


@dataclass(frozen=True)
class Calibration:
    """Temperatures by depth, fitted on all texts, and how far predicted and observed acceptance are
    apart: with the draft's own temperatures, and by two-fold cross-validation of fitted ones."""

    temperatures: list[float]
    error_before: list[float]
    error_after: list[float]


def says_nothing(where: str = "") -> BadInput:
    what = "this draft does not say how sure it is"
    return BadInput(what, where=where, fix="objective.kind=dspark trains one that does")


def has_confidence(draft: DraftModel) -> TypeGuard[BlockDraftModel]:
    """Whether a draft has a confidence head, so that it can be calibrated."""
    return isinstance(draft, BlockDraftModel) and draft.confidence_head is not None


def calibrate(
    target: Eagle3TargetBackend,
    draft: BlockDraftModel,
    texts: Sequence[Text],
    *,
    depths: int,
    batch_tokens: int = 8192,
) -> Calibration:
    """Fit temperatures on the target's own texts. Their error is cross-validated: every text is
    judged with temperatures fitted on others, except for a single text."""
    halves = [
        sureness(target, draft, half, depths=depths, batch_tokens=batch_tokens)
        for half in (texts[::2], texts[1::2])
        if half
    ]
    whole, previous = Sureness.joined(halves), list(draft.config.confidence_temperatures)
    crossed = Sureness.joined(
        [half.at(fit_temperatures(other)) for half, other in zip(halves, halves[::-1], strict=True)]
    )
    temperatures = fit_temperatures(whole)
    depths_fitted = range(len(temperatures))
    return Calibration(
        temperatures,
        [calibration_error(whole, previous, depth) for depth in depths_fitted],
        [calibration_error(crossed, [], depth) for depth in depths_fitted],
    )


@torch.no_grad()
def sureness(
    target: Eagle3TargetBackend,
    draft: BlockDraftModel,
    texts: Sequence[Text],
    *,
    depths: int,
    batch_tokens: int = 8192,
) -> Sureness:
    """The draft's confidence at every drafting slot of some texts, and the tokens accepted."""
    selected_W = draft.selected_token_ids
    if draft.confidence_head is None or draft.token_head is None or selected_W is None:
        raise says_nothing()
    rollouts, parts = _WholeBlocks(draft, depths), []
    for pack in packs_of([len(text) for text in texts], batch_tokens):
        tokens = as_pack([texts[piece.row] for piece in pack])
        batch = ask(target, tokens)
        picks_S = target_picks(batch, tokens, target.info().head, selected_W)
        accepted_S = accepted_lengths(rollouts, batch, tokens, picks_S).reshape(-1)
        plan = rollouts.plan(tokens)
        slot_T = plan.slot_T.cpu().numpy()
        slot_N = slot_T[plan.depths[0].slot_N.cpu().numpy()]
        odds_NK = np.full((len(slot_N), depths), np.nan)
        for depth, inputs_NE in enumerate(rollouts.head_inputs(batch, plan)):
            odds_N = rollouts.confidence(inputs_NE).double().cpu().numpy()
            odds_NK[: len(odds_N), depth] = odds_N  # rows of a depth are the first of depth 0
        parts.append(Sureness(odds_NK, accepted_S[slot_N]))
    return Sureness.joined(parts)


class _WholeBlocks(StepRollouts):
    """All tokens are proposed, whatever their confidence."""

    cuts = False


def fit_temperatures(found: Sureness) -> list[float]:
    """Maximum-likelihood temperatures, one per depth, each given those before it."""
    temperatures: list[float] = []
    for depth in range(found.odds_NK.shape[1]):
        reached_N = ~np.isnan(found.odds_NK[:, depth])
        if not reached_N.any():
            break
        before_N = chances(found, temperatures)[reached_N, depth - 1] if depth else 1.0
        odds_N, stood_N = found.odds_NK[reached_N, depth], found.stood(depth)[reached_N]
        loss = partial(_log_loss, odds_N=odds_N, before_N=before_N, stood_N=stood_N)
        temperatures.append(float(np.exp(_minimize(loss, np.log(_COLDEST), np.log(_HOTTEST)))))
    return temperatures


def chances(found: Sureness, temperatures: Sequence[float]) -> Floats:
    """[N, depths] the running product of probabilities; depths without a temperature use 1."""
    return np.cumprod(_sigmoid(found.at(temperatures).odds_NK), axis=1, dtype=np.float64)


def calibration_error(
    found: Sureness, temperatures: Sequence[float], depth: int, bins: int = 10
) -> float:
    """The mean absolute difference of predicted and observed acceptance of the tokens up to one
    depth, over slots whose predictions lie in the same interval."""
    chance_N = chances(found, temperatures)[:, depth]
    reached_N = ~np.isnan(chance_N)
    chance_N, stood_N = chance_N[reached_N], found.stood(depth)[reached_N]
    bin_N = np.minimum((chance_N * bins).astype(np.int64), bins - 1)
    gap_N = chance_N - stood_N
    return float(np.abs(np.bincount(bin_N, gap_N)).sum() / max(1, len(chance_N)))


def _sigmoid(odds: Floats) -> Floats:
    value: Floats = 0.5 * (1 + np.tanh(odds / 2))
    return value


def _log_loss(
    log_temperature: float, *, odds_N: Floats, before_N: Floats | float, stood_N: NDArray[np.bool_]
) -> float:
    chance_N = before_N * _sigmoid(odds_N / np.exp(log_temperature))
    clipped_N = np.clip(chance_N, 1e-12, 1 - 1e-12)
    return float(-np.where(stood_N, np.log(clipped_N), np.log1p(-clipped_N)).mean())


def _minimize(value: Any, low: float, high: float) -> float:
    """The minimum point of a unimodal function, by golden-section search."""
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = value(left), value(right)
    while high - low > 1e-4:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = value(right)
    return (low + high) / 2
