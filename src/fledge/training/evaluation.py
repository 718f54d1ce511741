"""Acceptance on held-out rows: the metric that selects the best checkpoint."""

from collections.abc import Callable
from typing import Any

import torch

from fledge.core.rows import TokenBatch
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.replay import Ints, replay_held_out, target_picks
from fledge.target.finite_check import check_answer
from fledge.training.batches import StepBatch, ask_ahead, held_out_share
from fledge.training.metrics import acceptance_metrics
from fledge.training.sharding import whole
from fledge.training.step import Models, Sums, answers_of


@torch.no_grad()
def evaluate(
    models: Models,
    batches: list[TokenBatch],
    picks: dict[int, Ints] | None = None,
    on_pack: Callable[[int, int], None] = lambda done, total: None,
    stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measure acceptance in two ways on this rank's share of the held-out packs, summed over ranks.

    `acceptance_length` is the one that selects checkpoints: tokens per round of greedy drafting, by
    exact replay of the rounds through every answer. `tau` is the one that training steps log, too:
    1 + sum over depths of P(all tokens up to that depth are correct), with every slot as a start.

    `picks` caches the frozen target's picks by batch, so that its head runs once per run. `on_pack`
    is called with the number of this rank's packs that are done, and their total. `stopping` is
    polled while the target is waited for: once it is true on any rank, all raise StopRequested.
    """
    target, objective, world = models.target, models.objective, models.world
    draft: Any = objective.draft_model
    picks = {} if picks is None else picks
    head = target.info().head.to(models.device)
    sums, replayed = Sums.zeros(objective.depths, models.device), Acceptance.none(objective.depths)
    indices, rounds = held_out_share(batches, world), -(-len(batches) // world.size)
    # A rank that has fewer packs than another joins its passes.
    micro = [*(batches[index] for index in indices), *[None] * (rounds - len(indices))]
    asked = ask_ahead(
        models, (StepBatch(n, 0, (rows,)) for n, rows in enumerate(micro)), stopping=stopping
    )
    was_training = draft.training
    draft.eval()
    rollouts = rollouts_of(draft, objective.depths, dtype=objective.compute_dtype)
    with whole(draft):
        answers = (answer for step in asked for answer in answers_of(models, step))
        for done, (batch, answer) in enumerate(answers):
            on_pack(done, len(indices))
            check_answer(target, answer, batch)
            ready = objective.prepare(batch, answer, seed=0)  # the same rollouts every time
            sums.add(objective.score(ready, ready.charged_K))
            index = indices[done]
            if index not in picks:
                picks[index] = target_picks(answer, batch, head, rollouts.selected_token_ids)
            replayed += replay_held_out(answer, batch, rollouts, picks[index])
    draft.train(was_training)
    counts = torch.tensor(replayed.counts(), dtype=torch.int64, device=models.device)
    total = Acceptance.from_counts(world.sum_(counts).tolist())
    return {**total.to_json(), **acceptance_metrics(sums.over(world))}
