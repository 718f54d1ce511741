"""Acceptance on held-out rows: the number that chooses the best checkpoint."""

from typing import Any

import torch

from fledge.data.pack import TokenBatch
from fledge.train.metrics import acceptance_metrics
from fledge.train.step import Parts, Sums, ask_target, plan_batch


@torch.no_grad()
def evaluate(parts: Parts, batches: list[TokenBatch]) -> dict[str, Any]:
    """Teacher-forced rollouts over this rank's share of the held-out packs, summed over ranks.

    `tau` is 1 + sum over depths of P(all tokens up to that depth are right), over every slot whose
    tokens are all supervised: greedy chain drafting, the bonus token counted.
    """
    objective = parts.objective
    was_training = objective.draft_model.training
    objective.draft_model.eval()
    sums = Sums.zeros(objective.depths, parts.device)
    for batch in batches[parts.world.rank :: parts.world.size]:
        plan = plan_batch(objective, batch, seed=0)  # the same rollouts at every evaluation
        given = ask_target(parts.target, batch).to(parts.device).to_trainer_inputs()
        ready = objective.prepare(plan=plan, **given)
        sums.add(objective(prepared=ready, normalizer=ready.charged_K, **given))
    objective.draft_model.train(was_training)
    return acceptance_metrics(sums.over(parts.world))
