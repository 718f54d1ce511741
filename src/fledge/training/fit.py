"""The training loop: resume, step, log / evaluate / save on cadence, close. See also `step.py`, and
`session.py` for what happens around a step."""

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from fledge.core.distributed import leave_world
from fledge.core.errors import TargetUnreachable
from fledge.core.files import alone_in
from fledge.core.machine import is_main_rank
from fledge.core.rows import TokenBatch
from fledge.recipe.schema import Recipe
from fledge.training import checkpoint as checkpoints
from fledge.training.batches import StopRequested, ask_ahead, held_out_share
from fledge.training.evaluation import evaluate
from fledge.training.session import Observer, Outcome, Session, State, in_vain
from fledge.training.setup import Training, set_up
from fledge.training.signals import StopSignal
from fledge.training.step import train_step


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


def _evaluate(session: Session, stopping: Callable[[], bool]) -> bool:
    """Measure held-out acceptance; return whether the draft is the best so far."""
    training, parts = session.training, session.parts
    on_pack = partial(training.watch, "evaluating")
    with parts.averaged():
        picks = training.held_out_picks
        measured = evaluate(parts, training.held_out, picks, on_pack, stopping)
    return session.evaluated(measured)


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
