"""Acceptance on held-out rows: the number that chooses the best checkpoint."""

from typing import Any

import torch

from fledge.data.pack import TokenBatch
from fledge.train.ahead import answers_ahead, together
from fledge.train.metrics import acceptance_metrics
from fledge.train.step import Parts, Sums, plan_batch


@torch.no_grad()
def evaluate(parts: Parts, batches: list[TokenBatch]) -> dict[str, Any]:
    """Teacher-forced rollouts over this rank's share of the held-out packs, summed over ranks.

    `tau` is 1 + sum over depths of P(all tokens up to that depth are right), over every slot whose
    tokens are all supervised: greedy chain drafting, the bonus token counted.
    """
    objective, world = parts.objective, parts.world
    was_training = objective.draft_model.training
    objective.draft_model.eval()
    sums = Sums.zeros(objective.depths, parts.device)

    def measure() -> None:
        for batch, answer in answers_ahead(parts.target, batches[world.rank :: world.size]):
            plan = plan_batch(objective, batch, seed=0)  # the same rollouts at every evaluation
            given = answer.to(parts.device).to_trainer_inputs()
            ready = objective.prepare(plan=plan, **given)
            sums.add(objective(prepared=ready, normalizer=ready.charged_K, **given))

    together(parts.target, world, parts.device, measure)
    objective.draft_model.train(was_training)
    return acceptance_metrics(sums.over(world))
