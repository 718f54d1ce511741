"""The training loop: resume, step, log / evaluate / save on cadence, close. See also `step.py`.

One draft is the plain case. Several that share their target and their rows (`several_drafts.py`)
take each step one after the other, with one answer of the target; what each of them does around it
is in `session.py`.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from fledge.core.distributed import leave_world
from fledge.core.errors import TargetUnreachable
from fledge.core.files import alone_in
from fledge.core.machine import is_main_rank
from fledge.core.rows import TokenBatch
from fledge.recipe.schema import Recipe
from fledge.training import checkpoint as checkpoints
from fledge.training import lengthening, several_drafts
from fledge.training.batches import held_out_share
from fledge.training.evaluate import evaluate
from fledge.training.prefetch import StopRequested, ask_ahead
from fledge.training.session import Observer, Outcome, Session, State, in_vain
from fledge.training.setup import Training, set_up
from fledge.training.signals import StopSignal
from fledge.training.step import train_step


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
    first, asking = sessions[0].training, several_drafts.asking(sessions)
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
                for session, share in several_drafts.shares(asking, batch, taking):
                    session.training.watch("training", session.step, "")
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
    if len(sessions) > 1:
        return several_drafts.evaluate(sessions, stopping)
    training, step = sessions[0].training, sessions[0].step
    return [
        evaluate(
            training.parts, training.held_out, training.held_out_picks,
            lambda done, packs: training.watch("evaluating", step, f"{done} of {packs} packs"),
            stopping,
        )
    ]  # fmt: skip


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
    if newest is None or not newest.finished or lengthening.other_length(recipe, directory):
        return None
    state = State.of(newest)
    if is_main_rank():
        with alone_in(directory):
            keep = None if complaints else recipe.checkpoint.keep
            checkpoints.finish_save(directory, state.best_step, keep=keep)
    return Outcome(state, finished=True, already=True, warnings=tuple(in_vain(recipe, state)))
