"""Acceptance on held-out rows: the number that chooses the best checkpoint."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.decode.strategies.registry import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.packed import Ints, target_picks
from fledge.measure.replay import replay_held_out
from fledge.target.finite import check_answer
from fledge.target.heard import as_heard
from fledge.train.ahead import answers_ahead, together
from fledge.train.batches import held_out_share
from fledge.train.metrics import acceptance_metrics
from fledge.train.sharding import whole
from fledge.train.step import Models, Sums

_ANYTHING = 1.0005  # the least acceptance length that does not read 1.000


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
    return evaluate_together(models, [models], batches, [picks], on_pack)[0]


@torch.no_grad()
def evaluate_together(
    asked: Models,
    drafts: Sequence[Models],
    batches: list[TokenBatch],
    picks: Sequence[dict[int, Ints] | None],
    on_pack: Callable[[int, int], None] = lambda done, total: None,
) -> list[dict[str, Any]]:
    """The same of several drafts, with one answer a pack: of `asked`, whose target shows what all
    of them hear."""
    target, world = asked.target, asked.world
    measured = [_Measured(*pair) for pair in zip(drafts, picks, strict=True)]
    mine = held_out_share(batches, world)

    def measure() -> None:
        answers = answers_ahead(target, [batches[index] for index in mine])
        for done, (index, (batch, on_host)) in enumerate(zip(mine, answers, strict=True)):
            on_pack(done, len(mine))
            answer = on_host.to(asked.device)
            check_answer(target, answer, batch)
            for one in measured:
                with one.models.turn():
                    one.add(index, batch, as_heard(answer, target, one.models.target))
        for _ in range(len(mine), -(-len(batches) // world.size)):
            target.join()  # other ranks have one pack more

    with contextlib.ExitStack() as whole_drafts:
        for models in drafts:
            whole_drafts.enter_context(whole(models.objective.draft_model))
        together(asked, measure)
    return [one.total() for one in measured]


class _Measured:
    """What has been seen of one draft, which is in eval mode meanwhile."""

    def __init__(self, models: Models, picks: dict[int, Ints] | None) -> None:
        self.models, objective = models, models.objective
        draft: Any = objective.draft_model
        self._was_training = draft.training
        draft.eval()
        self._picks = {} if picks is None else picks
        self._rollouts = rollouts_of(draft, objective.depths, dtype=objective.compute_dtype)
        self._head = models.target.info().head.to(models.device)
        self._sums = Sums.zeros(objective.depths, models.device)
        self._replayed = Acceptance.none(objective.depths)

    def add(self, index: int, batch: TokenBatch, answer: Eagle3TargetBatch) -> None:
        objective, picks, rollouts = self.models.objective, self._picks, self._rollouts
        ready = objective.prepare(batch, answer, seed=0)  # the same rollouts every time
        self._sums.add(objective.score(ready, ready.charged_K))
        if index not in picks:
            picks[index] = target_picks(answer, batch, self._head, rollouts.selected_token_ids)
        self._replayed += replay_held_out(answer, batch, rollouts, picks[index])

    def total(self) -> dict[str, Any]:
        """Over all ranks; there is no more to come."""
        world = self.models.world
        self.models.objective.draft_model.train(self._was_training)
        mine = torch.tensor(self._replayed.counts(), dtype=torch.int64, device=self.models.device)
        total = Acceptance.from_counts(world.sum_(mine).tolist())
        return {**total.to_json(), **acceptance_metrics(self._sums.over(world))}


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
