"""The metrics of a scored rollout: sums and counts per depth, on the device.

`depths` is the number K of depths that an objective reports. A plan may be shallower: EAGLE-1
trains one depth and reports as many as serving drafts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.objective.base import RolloutOutput
from fledge.objective.head_loss import HeadLoss
from fledge.rollout.plan import RolloutPlan


def per_depth(plan: RolloutPlan, values_N: Tensor, depths: int) -> Tensor:
    """[K] sums of per-element values; in int64 for counts."""
    if not values_N.is_floating_point():
        values_N = values_N.to(torch.int64)
    return values_N.new_zeros(depths).index_add_(0, plan.head.depth_N, values_N)


def rollout_output(
    plan: RolloutPlan,
    scored: HeadLoss,
    *,
    charged_N: Tensor,  # bool
    covered_N: Tensor,  # bool; False for elements that only pad the plan
    depths: int,
) -> RolloutOutput:
    """The loss and the metrics of a batch whose elements are scored."""
    # an element that is not covered is a rejection, charged or not
    correct_N = scored.correct_N & covered_N
    reached_K, hits_K = _prefix_counts(plan, correct_N)
    return RolloutOutput(
        loss=scored.loss,
        loss_sums=per_depth(plan, scored.row_loss_N * charged_N, depths),
        charged=per_depth(plan, charged_N, depths),
        correct=per_depth(plan, correct_N, depths),
        step_valid=_at_all_depths(plan.step_valid_K, depths),
        step_reached=_at_all_depths(reached_K, depths),
        step_prefix_hits=_at_all_depths(hits_K, depths),
    )


def _prefix_counts(plan: RolloutPlan, correct_N: Tensor) -> tuple[Tensor, Tensor]:
    """Per depth of the plan: slots that are supervised up to it and correct at all depths before
    it, and how many of those are correct at it too."""
    correct_P = torch.zeros_like(plan.supervised_P)
    correct_P[plan.head.element_N] = correct_N
    hits, reached = [], []
    alive = torch.ones_like(plan.by_depth(correct_P)[0])
    for correct, supervised in zip(
        plan.by_depth(correct_P), plan.by_depth(plan.supervised_P), strict=True
    ):
        alive = alive[: len(correct)] & supervised
        reached.append(alive.sum())
        alive = alive & correct
        hits.append(alive.sum())
    return torch.stack(reached), torch.stack(hits)


def _at_all_depths(count_K: Tensor, depths: int) -> Tensor:
    """Counts of a plan, padded with zeros to `depths`."""
    return F.pad(count_K, (0, depths - len(count_K)))
