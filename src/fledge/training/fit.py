"""The training loop: resume, step, log / evaluate / save on cadence, close; and the evaluation on
held-out rows. See also `step.py`, and `session.py` for what happens around a step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fledge.core.distributed import leave_world
from fledge.core.errors import TargetUnreachable
from fledge.core.files import alone_in
from fledge.core.machine import is_main_rank
from fledge.core.rows import TokenBatch
from fledge.decode.strategy import rollouts_of
from fledge.measure.figures import Acceptance
from fledge.measure.replay import Ints, replay_held_out, target_picks
from fledge.recipe.schema import Recipe
from fledge.target.finite_check import check_answer
from fledge.training import checkpoint as checkpoints
from fledge.training.batches import StepBatch, StopRequested, ask_ahead, held_out_share
from fledge.training.metrics import acceptance_metrics
from fledge.training.session import Observer, Outcome, Session, State, in_vain
from fledge.training.setup import Training, set_up
from fledge.training.sharding import whole
from fledge.training.signals import StopSignal
from fledge.training.step import Models, Sums, answers_of, train_step


def fit(training: Training, observer: Observer) -> Outcome:
    """Train from wherever the run stands to its end, or to the next signal."""
    with ExitStack() as held:
        if training.parts.world.is_main:
            held.enter_context(alone_in(training.directory))
        session = Session(training, observer)
        held.callback(session.close)
        return session.outcome(_fit(session))


def _fit(session: Session) -> int:
    """Train to the end. Returns the signal that ended it early, or 0; a signal that only another
    rank received counts as SIGTERM."""
    training, parts, begin = session.training, session.parts, session.step
    elsewhere = 0
    if begin:
        parts.target.asked_before(_asked_before(training, begin))
    prefetched = training.stream.prefetched(begin, training.recipe.training.prefetch)
    with StopSignal() as stop, closing(prefetched) as batches:

        def stop_requested() -> bool:
            return bool(stop.received)

        try:
            if session.evaluation_missed:
                best = _evaluate(session, stop_requested)
                if begin:  # a run that has not begun leaves no checkpoint
                    session.save_if_due(best=best, stopping=True)
            parts.objective.draft_model.train()
            parts.clock.read()
            for batch in ask_ahead(parts, batches, stopping=stop_requested):
                training.watch("training", session.step, training.stream.steps)
                lr = training.lr(session.step)
                parts.objective.begin_step(session.step / training.stream.steps)
                result = train_step(parts, batch, lr=lr, stopping=stop_requested())
                stopping = session.stepped(batch, result, lr)
                best = session.evaluation_due and _evaluate(session, stop_requested)
                session.save_if_due(best=best, stopping=stopping)
                if stopping:
                    elsewhere = signal.SIGTERM
                    break
            session.read()
        except TargetUnreachable as error:  # between two steps: nothing is half done
            session.stop_here()
            if isinstance(error, StopRequested):
                elsewhere = signal.SIGTERM
            elif not stop.received:
                raise
    return stop.received or elsewhere


def _asked_before(training: Training, step: int) -> Iterator[Callable[[], TokenBatch]]:
    """What the target was asked about until `step`, in order: this rank's held-out packs, which
    are evaluated before the first step, then its micro-batches."""
    for index in held_out_share(training.held_out, training.parts.world):
        yield partial(training.held_out.__getitem__, index)
    yield from training.stream.micro_batches_before(step)


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


def _evaluate(session: Session, stopping: Callable[[], bool]) -> bool:
    """Measure held-out acceptance; return whether the draft is the best so far."""
    training, parts = session.training, session.parts
    on_pack = partial(training.watch, "evaluating")
    picks = training.held_out_picks
    return session.evaluated(evaluate(parts, training.held_out, picks, on_pack, stopping))


def fit_recipe(recipe: Recipe, observer: Observer) -> Outcome:
    """Train a recipe from start to end, unless its run is finished already."""
    before = finished_before(recipe)
    if before is not None:
        return before
    training = set_up(recipe)
    with training.parts.target:
        outcome = fit(training, observer)
    leave_world(training.parts.world)
    return outcome


def finished_before(recipe: Recipe) -> Outcome | None:
    """The outcome of a finished run in the recipe's directory, read without its data or target;
    None if there is no such run."""
    directory = Path(recipe.run.output_dir)
    newest, complaints = checkpoints.newest_checkpoint(directory)
    if newest is None or not newest.finished:
        return None
    state = State.of(newest)
    if is_main_rank():
        with alone_in(directory):
            keep = None if complaints else recipe.checkpoint.keep
            checkpoints.finish_save(directory, state.best_step, keep=keep)
    return Outcome(state, finished=True, already=True, warnings=tuple(in_vain(recipe, state)))
