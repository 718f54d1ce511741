"""The training loop: resume, step, log / evaluate / save on cadence, close. See also `step.py`.

One draft is the plain case. Several that share their target and their rows take each step one after
the other, with one answer of the target; what each of them does around it is in `session.py`.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fledge.core.distributed import leave_world
from fledge.core.errors import TargetUnreachable
from fledge.core.files import alone_in
from fledge.core.machine import is_main_rank
from fledge.core.rows import TokenBatch
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend, behind_view, finished, narrowed
from fledge.training import checkpoint as checkpoints
from fledge.training.batches import StepBatch, StopRequested, ask_ahead, held_out_share
from fledge.training.clock import Clocks
from fledge.training.continuation import other_length
from fledge.training.evaluation import evaluate, evaluate_together
from fledge.training.session import Observer, Outcome, Session, State, in_vain
from fledge.training.setup import Training, set_up
from fledge.training.signals import StopSignal
from fledge.training.step import Parts, answers_of, train_step


def fit(training: Training, observer: Observer) -> Outcome:
    """Train from wherever the run stands to its end, or to the next signal."""
    return fit_together([training], [observer])[0]


def fit_together(trainings: Sequence[Training], observers: Sequence[Observer]) -> list[Outcome]:
    """The same for several drafts, from wherever each of them stands."""
    with contextlib.ExitStack() as held:
        for training in trainings:
            if training.parts.world.is_main:
                held.enter_context(alone_in(training.directory))
        sessions = []
        for training, observer in zip(trainings, observers, strict=True):
            sessions.append(Session(training, observer))
            held.callback(sessions[-1].close)
        ended_by = _fit(sessions)
        return [session.outcome(ended_by) for session in sessions]


def _fit(sessions: Sequence[Session]) -> int:
    """Train to the end. Returns the signal that ended it early, or 0; a signal that only another
    rank received counts as SIGTERM."""
    elsewhere = 0
    first, asking = sessions[0].training, asking_parts(sessions)
    begin = min(session.step for session in sessions)  # drafts that are ahead wait
    if begin:
        asking.target.asked_before(_asked_before(first, begin))
    prefetched = first.stream.prefetched(begin, first.recipe.training.prefetch)
    with StopSignal() as stop, closing(prefetched) as batches:

        def stop_requested() -> bool:
            return bool(stop.received)

        try:
            missed = [session for session in sessions if session.evaluation_missed]
            improved = _evaluate(missed, stop_requested)
            for session in missed:
                session.save_evaluated(best=session in improved)
            for session in sessions:
                session.parts.objective.draft_model.train()
                session.parts.clock.read()
            for batch in ask_ahead(asking, batches, stopping=stop_requested):
                taking = [session for session in sessions if session.step == batch.step]
                stopping = False
                for session, share in shares(asking, batch, taking):
                    session.report("training")
                    lr, parts = session.lr, session.parts
                    with parts.own_draws():
                        result = train_step(parts, share, lr=lr, stopping=stop_requested())
                    stopping |= session.stepped(batch, result, lr)
                due = [session for session in taking if session.evaluation_due]
                improved = _evaluate(due, stop_requested)
                for session in taking:
                    session.save_if_due(best=session in improved, stopping=stopping)
                if stopping:
                    elsewhere = signal.SIGTERM
                    break
            for session in sessions:
                session.read()
        except TargetUnreachable as error:  # between two steps: nothing is half done
            for session in sessions:
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


def _evaluate(sessions: Sequence[Session], stopping: Callable[[], bool]) -> list[Session]:
    """Measure held-out acceptance. Returns the sessions whose draft is their best so far."""
    if not sessions:
        return []
    with contextlib.ExitStack() as drafts:
        for session in sessions:
            drafts.enter_context(session.parts.averaged())
        measured = _measure(sessions, stopping)
    pairs = zip(sessions, measured, strict=True)
    return [session for session, evaluation in pairs if session.evaluated(evaluation)]


def _measure(sessions: Sequence[Session], stopping: Callable[[], bool]) -> list[dict[str, Any]]:
    first = sessions[0].training

    def on_pack(done: int, packs: int) -> None:
        for session in sessions:
            session.report("evaluating", f"{done} of {packs} packs")

    if len(sessions) == 1:
        return [evaluate(first.parts, first.held_out, first.held_out_picks, on_pack, stopping)]
    parts = [session.parts for session in sessions]
    picks = [session.training.held_out_picks for session in sessions]
    asking = asking_parts(sessions)
    return evaluate_together(asking, parts, first.held_out, picks, on_pack, stopping)


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
    None if there is no such run, or if it is to be lengthened."""
    directory = Path(recipe.run.output_dir)
    newest, complaints = checkpoints.newest_checkpoint(directory)
    if newest is None or not newest.finished or other_length(recipe, directory):
        return None
    state = State.of(newest)
    if is_main_rank():
        with alone_in(directory):
            keep = None if complaints else recipe.checkpoint.keep
            checkpoints.finish_save(directory, state.best_step, keep=keep)
    return Outcome(state, finished=True, already=True, warnings=tuple(in_vain(recipe, state)))


# --- several drafts -------------------------------------------------------------------------------
# Several drafts in one pass: the target is asked once per batch, and every draft takes a step.
#
# Each draft is a run of its own, and its directory holds what it would hold had it been trained
# alone, bit for bit. The drafts share the target, which provides all aux layers that any of them
# uses (`target/base.py`), and the rows in their order. Each has its own weights, optimizer,
# schedule, metrics, checkpoints and random generators. A killed run may leave them at different
# steps: those that are ahead wait until the others have caught up.


def target_of(trainings: Sequence[Training]) -> Eagle3TargetBackend:
    """The target that all drafts share; for a single draft, its own."""
    target = trainings[0].parts.target
    return target if len(trainings) == 1 else behind_view(target)


def asking_parts(sessions: Sequence[Session]) -> Parts:
    """The parts that ask the target for all drafts: those of the only draft, or those of the first
    one with the shared target."""
    parts = sessions[0].parts
    if len(sessions) == 1:
        return parts
    target = target_of([session.training for session in sessions])
    clock = Clocks([session.parts.clock for session in sessions], parts.device)
    return replace(parts, target=target, clock=clock)


def shares(
    asking: Parts, batch: StepBatch, sessions: Sequence[Session]
) -> Iterator[tuple[Session, StepBatch]]:
    """Yield the batch for each draft, with its aux layers of the shared answer. A draft that is
    trained alone gets the batch as it is."""
    if sessions[0].parts.target is asking.target:
        yield sessions[0], batch
        return
    answers = [answer for _, answer in answers_of(asking, batch)]
    for session in sessions:
        target = session.parts.target
        futures = tuple(finished(narrowed(answer, asking.target, target)) for answer in answers)
        yield session, replace(batch, answers=futures)
