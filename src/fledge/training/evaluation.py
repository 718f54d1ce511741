"""Acceptance on held-out rows: the metric that selects the best checkpoint."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.rows import TokenBatch
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.replay import Ints, replay_held_out, target_picks
from fledge.target.base import narrowed
from fledge.target.finite_check import check_answer
from fledge.training.batches import answers_ahead, held_out_share
from fledge.training.metrics import acceptance_metrics
from fledge.training.sharding import whole
from fledge.training.step import Models, Sums

_MIN_LENGTH = 1.0005  # the smallest acceptance length that is not displayed as 1.000


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
    return evaluate_together(models, [models], batches, [picks], on_pack, stopping)[0]


@torch.no_grad()
def evaluate_together(
    asked: Models,
    drafts: Sequence[Models],
    batches: list[TokenBatch],
    picks: Sequence[dict[int, Ints] | None],
    on_pack: Callable[[int, int], None] = lambda done, total: None,
    stopping: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Evaluate several drafts with one answer per pack. The target of `asked` is the one that gives
    it, with the aux layers of all drafts."""
    target, world = asked.target, asked.world
    evaluations = [_Evaluation(*pair) for pair in zip(drafts, picks, strict=True)]
    indices, rounds = held_out_share(batches, world), -(-len(batches) // world.size)
    share = [batches[index] for index in indices]
    with contextlib.ExitStack() as whole_drafts:
        for models in drafts:
            whole_drafts.enter_context(whole(models.objective.draft_model))
        answers = answers_ahead(asked, share, rounds=rounds, stopping=stopping)
        for done, (batch, on_host) in enumerate(answers):
            on_pack(done, len(indices))
            answer = on_host.to(asked.device)
            check_answer(target, answer, batch)
            for evaluation in evaluations:
                answered = narrowed(answer, target, evaluation.models.target)
                with evaluation.models.own_draws():
                    evaluation.add(indices[done], batch, answered)
    return [evaluation.total() for evaluation in evaluations]


class _Evaluation:
    """The evaluation of one draft, which is in eval mode from here to `total`."""

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
        """End the evaluation; return its metrics over all ranks."""
        world = self.models.world
        self.models.objective.draft_model.train(self._was_training)
        counts = torch.tensor(self._replayed.counts(), dtype=torch.int64, device=self.models.device)
        total = Acceptance.from_counts(world.sum_(counts).tolist())
        return {**total.to_json(), **acceptance_metrics(self._sums.over(world))}


def learnt_nothing(before: float | None, best: float, *, lr: float) -> list[str]:
    """A warning if a draft's best length is no better than that of no draft, or than its own before
    training; otherwise an empty list."""
    if best < _MIN_LENGTH:
        length = f"{best:.3f}, equal to no draft at all"
    elif before is not None and best <= before:
        length = f"{best:.3f}, and {before:.3f} before training"
    else:
        return []
    what = f"the draft learned nothing: held-out acceptance length {length}"
    return [f"{what}; is training.lr ({lr:g}) too high, or the data too little?"]
