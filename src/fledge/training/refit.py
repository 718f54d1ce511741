"""Moves a draft from one target to another: its input map is refitted so that the new target's
states lead to what the old target's states led to.

    fc' = the map nearest to fc with   fc' (new states of a token)  =  fc (its old states)

in the sense of `fit_change`, over all tokens of some rows. Every token has the same weight,
whatever the magnitude of its state: both sides are divided by the size of the old output, because
norms follow. Nothing else in the draft changes. So if the new states are a linear function of the
old ones, the draft proposes exactly what it did before; otherwise one map comes as close as it can.

At deeper positions of a round, EAGLE-1 and EAGLE-2 read their own states through the same map, and
those do not change: their map is fitted to both, and recovers less. Tables that a draft took from
its target (embedding, head) are replaced by the new one's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.rows import TokenBatch
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.replay import replay_held_out, target_picks
from fledge.methods.registry import method_of
from fledge.methods.shared.draft import DraftModel, Reading
from fledge.target.base import Eagle3TargetBackend, InputEmbedding
from fledge.target.finite_check import check_answer, checked_answer
from fledge.target.hf.model import HFEagle3TargetModel

PENALTIES = tuple(10.0**power for power in range(-14, 2))  # `solve` rejects those too small
_TINY = 1e-12  # lower limit for the size of a token's output, which is divided by

# --- ridge ----------------------------------------------------------------------------------------
# Corrects a linear map as little as the rows require: ridge regression in closed form.
#
# A row (x, r) is an input of the map, and the amount by which its output should change there. The
# change C [E, X] minimizes
#
#     sum over rows of |C x - r|^2  +  penalty * sum over inputs j of g_j |C_j|^2
#
# where g_j = sum of x_j^2, so that the penalty does not depend on the scale of an input. Only
# G = sum x x^T, R = sum r x^T and sum |r|^2 are kept, in float64: they need the same memory for any
# number of rows, and those of two sets of rows add up to those of their union.


@dataclass
class Moments:
    """The sums over rows that a fit needs; `add` includes more rows."""

    xx_XX: Tensor
    rx_EX: Tensor
    rr: Tensor  # []
    rows: Tensor  # [], their number

    @classmethod
    def like(cls, map_EX: Tensor) -> "Moments":
        """Sums over no rows, for a map of this shape and on its device."""
        outputs, inputs = map_EX.shape
        shapes = ((inputs, inputs), (outputs, inputs), (), ())
        return cls(*(map_EX.new_zeros(shape, dtype=torch.float64) for shape in shapes))

    def add(self, x_NX: Tensor, r_NE: Tensor) -> None:
        x_NX, r_NE = x_NX.double(), r_NE.double()
        self.xx_XX.addmm_(x_NX.t(), x_NX)
        self.rx_EX.addmm_(r_NE.t(), x_NX)
        self.rr += r_NE.square().sum()
        self.rows += len(x_NX)

    def __add__(self, other: "Moments") -> "Moments":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Moments(*(a + b for a, b in pairs))

    def error(self, change_EX: Tensor) -> float:
        """The root mean square of C x - r, over rows and outputs."""
        reduction = (change_EX @ self.xx_XX - 2 * self.rx_EX) * change_EX
        outputs = self.rows.clamp_min(1) * len(self.rx_EX)
        return float(((reduction.sum() + self.rr).clamp_min(0) / outputs).sqrt())

    def solve(self, penalty: float) -> Tensor | None:
        """The change [E, X]; None if it is numerically underdetermined by the rows."""
        power_X = self.xx_XX.diagonal()
        # for inputs that are always zero
        floor = 1e-12 * power_X.mean().clamp_min(torch.finfo(torch.float64).tiny)
        factor_XX, failed = torch.linalg.cholesky_ex(
            self.xx_XX + torch.diag(penalty * power_X.clamp_min(float(floor)))
        )
        if bool(failed):
            return None
        change_EX: Tensor = torch.cholesky_solve(self.rx_EX.t(), factor_XX).t()
        return change_EX


class Fitted(NamedTuple):
    """The result of a fit. Errors are on the rows that chose the penalty, before fitting them."""

    change_EX: Tensor
    penalty: float | None  # None: no penalty improved on leaving the map unchanged
    error: float
    error_before: float  # without any change


def fit_change(fitted: Moments, judged: Moments) -> Fitted:
    """Fit with every penalty, choose the one that is best on the `judged` rows, then refit with it
    on all rows."""
    zero_EX = torch.zeros_like(fitted.rx_EX)
    before = judged.error(zero_EX)
    best: tuple[float, float | None] = (before, None)
    for penalty in PENALTIES:
        change_EX = fitted.solve(penalty)
        if change_EX is not None:
            best = min(best, (judged.error(change_EX), penalty), key=lambda pair: pair[0])
    error, chosen = best
    change = None if chosen is None else (fitted + judged).solve(chosen)
    if change is None:
        return Fitted(zero_EX, None, before, before)
    return Fitted(change, chosen, error, before)


# --- the draft ------------------------------------------------------------------------------------


class Targets(NamedTuple):
    """The target before and after its change."""

    old: HFEagle3TargetModel
    new: HFEagle3TargetModel


def reading_of(draft: DraftModel, where: str = "") -> Reading:
    """The map through which a draft reads its target; raises BadInput if it has no such map."""
    method = method_of(draft.config)
    reading = method.reading(draft)
    if reading is None:
        what = f"a draft of {method.title} does not read its target by one linear map"
        raise BadInput(what, where=where, fix="train it on the new target: draft.init_from")
    return reading


@torch.no_grad()
def refit(
    draft: DraftModel,
    targets: Targets,
    *,
    fitted: Iterable[TokenBatch],
    judged: Iterable[TokenBatch],
) -> Fitted:
    """Refit the draft in place. The penalty is the one that is best on the `judged` packs; the
    final fit includes them as well."""
    reading = reading_of(draft)
    fitted_sums, judged_sums = (_moments(reading, targets, packs) for packs in (fitted, judged))
    fit = fit_change(fitted_sums, judged_sums)
    before_EX = reading.weight_EX.to(torch.float64, copy=True)
    reading.weight_EX.copy_(before_EX + fit.change_EX)
    if reading.own_MX is not None:
        # The draft's own inputs change as little as possible, so that their output stays the same.
        after_EX = reading.weight_EX.double()
        error_ME = reading.own_MX.double() @ (before_EX - after_EX).t()
        correction_MX = error_ME @ torch.linalg.pinv(after_EX).t()
        reading.own_MX.add_(correction_MX.to(reading.own_MX.dtype))
    return fit


def _moments(reading: Reading, targets: Targets, packs: Iterable[TokenBatch]) -> Moments:
    weight_EX = reading.weight_EX.double()
    sums = Moments.like(weight_EX)
    for tokens in packs:
        old_NX, new_NX = (_inputs(reading, target, tokens) for target in targets)
        output_NE = old_NX @ weight_EX.t()
        size_N1 = output_NE.square().mean(-1, keepdim=True).sqrt().clamp_min(_TINY)
        error_NE = (old_NX - new_NX) @ weight_EX.t()
        sums.add(new_NX / size_N1, error_NE / size_N1)
        if reading.feeds_back:
            sums.add(old_NX / size_N1, torch.zeros_like(error_NE))
    return sums


def _inputs(reading: Reading, target: Eagle3TargetBackend, tokens: TokenBatch) -> Tensor:
    """The inputs [N, X] of all real tokens of a pack, in float64."""
    answer = target.features(tokens)
    check_answer(target, answer, tokens)
    aux_BTD = answer.aux_hidden_states.to(reading.weight_EX.device)
    return reading.inputs(aux_BTD[tokens.attention_mask.bool().to(aux_BTD.device)]).double()


@torch.no_grad()
def take_tables(draft: DraftModel, targets: Targets) -> tuple[str, ...]:
    """Replace the draft's embedding and head by the new target's where they equal the old one's, as
    engines would; return which. A table in another basis is not taken: the draft could not read it.
    Block drafts have neither table, and borrow both."""
    if draft.embed_tokens.weight.is_meta:
        return ()
    taken = []
    old_VD, new_VD = (target.get_input_embeddings().weight for target in targets)
    if _same(draft.embed_tokens.weight, old_VD) and _same_basis(old_VD, new_VD):
        draft.copy_embeddings_from_target(InputEmbedding(new_VD))
        taken.append("embedding")
    old_VD, new_VD = (target.info().head.weight_VD for target in targets)
    assert draft.selected_token_ids is not None
    own_rows_WD = old_VD[draft.selected_token_ids.to(old_VD.device)]
    if _same(draft.lm_head.weight, own_rows_WD) and _same_basis(old_VD, new_VD):
        draft.copy_head_from_target(InputEmbedding(new_VD))
        taken.append("head")
    return tuple(taken)


def _same(table: Tensor, other: Tensor) -> bool:
    return table.shape == other.shape and torch.equal(table, other.to(table))


def _same_basis(old_VD: Tensor, new_VD: Tensor) -> bool:
    """Whether the new table is the old one, tuned or rounded: their difference is less than half of
    its norm. A rotation into another basis makes it 1.4 times the norm."""
    old, new = (table.to(old_VD.device, torch.float32) for table in (old_VD, new_VD))
    return bool((new - old).norm() < 0.5 * old.norm())


@torch.no_grad()
def acceptance_length(
    draft: DraftModel,
    target: Eagle3TargetBackend,
    held_out: Iterable[TokenBatch],
    num_draft_tokens: int,
) -> float:
    """Tokens per round on held-out rows, by replay."""
    rollouts = rollouts_of(draft, num_draft_tokens)
    total = Acceptance.none(rollouts.depths)
    for tokens in held_out:
        answer = checked_answer(target, tokens)
        picks = target_picks(answer, tokens, target.info().head, rollouts.selected_token_ids)
        total += replay_held_out(answer, tokens, rollouts, picks)
    return total.length
