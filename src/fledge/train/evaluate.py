"""Acceptance on held-out rows: the number that chooses the best checkpoint."""

from collections.abc import Callable
from typing import Any

import torch

from fledge.core.rows import TokenBatch
from fledge.decode.strategies.registry import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.packed import Ints, target_picks
from fledge.measure.replay import replay_held_out
from fledge.target.finite import check_answer
from fledge.train.ahead import answers_ahead, together
from fledge.train.metrics import acceptance_metrics
from fledge.train.step import Models, Sums

_ANYTHING = 1.0005  # the least acceptance length that does not read 1.000


@torch.no_grad()
def evaluate(
    models: Models,
    batches: list[TokenBatch],
    picks: dict[int, Ints] | None = None,
    on_pack: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Two views of this rank's share of the held-out packs, summed over ranks.

    `acceptance_length` is the one that counts: tokens per round of greedy drafting, by exact replay
    of the rounds through every answer. `tau` is what a training step also measures: 1 + sum over
    depths of P(all tokens up to that depth are right), every slot a start.

    `picks` caches, by batch, the frozen target's picks, so its head runs once per run. `on_pack`
    is told how many of this rank's packs are done.
    """
    picks = {} if picks is None else picks
    target, objective, device, world = models.target, models.objective, models.device, models.world
    draft: Any = objective.draft_model
    was_training = draft.training
    draft.eval()
    rollouts = rollouts_of(draft, objective.depths, dtype=objective.compute_dtype)
    head = target.info().head.to(device)
    sums = Sums.zeros(objective.depths, device)
    replayed = Acceptance.none(objective.depths)
    mine = range(world.rank, len(batches), world.size)

    def measure() -> None:
        nonlocal replayed
        asked = answers_ahead(target, [batches[index] for index in mine])
        for done, (index, (batch, on_host)) in enumerate(zip(mine, asked, strict=True)):
            on_pack(done, len(mine))
            answer = on_host.to(device)
            check_answer(target, answer, batch)
            ready = objective.prepare(batch, answer, seed=0)  # the same rollouts every time
            sums.add(objective.score(ready, ready.charged_K))
            if index not in picks:
                picks[index] = target_picks(answer, batch, head, rollouts.selected_token_ids)
            replayed += replay_held_out(answer, batch, rollouts, picks[index])
        for _ in range(len(mine), -(-len(batches) // world.size)):
            target.join()  # other ranks have one pack more

    together(models, measure)
    draft.train(was_training)
    counts = torch.tensor(replayed.counts(), dtype=torch.int64, device=device)
    total = Acceptance.from_counts(world.sum_(counts).tolist())
    return {**total.to_json(), **acceptance_metrics(sums.over(world))}


def learnt_nothing(before: float | None, best: float, *, lr: float) -> list[str]:
    """What to say of a draft whose best length is that of no draft, or of itself before training;
    nothing to say: an empty list."""
    if best < _ANYTHING:
        so = f"{best:.3f}, equal to no draft at all"
    elif before is not None and best <= before:
        so = f"{best:.3f}, and {before:.3f} before training"
    else:
        return []
    what = f"the draft learnt nothing: held-out acceptance length {so}"
    return [f"{what}; is training.lr ({lr:g}) too high, or the data too little?"]
