"""Several drafts from one pass: the target is asked once a batch, and every draft takes its step.

Each of them is a run of its own, and its directory holds what it would hold had it been trained
alone, bit for bit. They share the target, which shows all layers that any of them listens to
(`target/heard.py`), and the rows in their order. Each has its own weights, optimizer, schedule,
metrics and checkpoints, and draws from generators of its own. A run that was killed may leave them
at different steps: those that are further wait until the others have caught up.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fledge.target.base import Eagle3TargetBackend, finished
from fledge.target.heard import as_heard, shown_to_all
from fledge.train.batches import StepBatch
from fledge.train.clock import Clocks
from fledge.train.evaluate import evaluate_together
from fledge.train.step import Parts, answers_of

if TYPE_CHECKING:
    from fledge.train.session import Session
    from fledge.train.setup import Training


def target_of(trainings: Sequence["Training"]) -> Eagle3TargetBackend:
    """The one target behind all drafts; of a single one, its own."""
    target = trainings[0].parts.target
    return target if len(trainings) == 1 else shown_to_all(target)


def asking(sessions: Sequence["Session"]) -> Parts:
    """What asks the target for all drafts: the parts of the only one, or of the first, with the
    target behind all of them."""
    parts = sessions[0].parts
    if len(sessions) == 1:
        return parts
    target = target_of([session.training for session in sessions])
    clock = Clocks([session.parts.clock for session in sessions], parts.device)
    return replace(parts, target=target, clock=clock)


def heard(
    asking: Parts, batch: StepBatch, sessions: Sequence["Session"]
) -> Iterator[tuple["Session", StepBatch]]:
    """The batch as each draft takes it: with its part of the one answer; or, for the only draft, as
    it is."""
    if sessions[0].parts.target is asking.target:
        yield sessions[0], batch
        return
    answers = [answer for _, answer in answers_of(asking, batch)]
    for session in sessions:
        target = session.parts.target
        own = tuple(finished(as_heard(answer, asking.target, target)) for answer in answers)
        yield session, replace(batch, answers=own)


def evaluate(sessions: Sequence["Session"]) -> list[dict[str, Any]]:
    """Held-out acceptance of each of several drafts, from one answer a pack."""
    trainings = [session.training for session in sessions]

    def on_pack(done: int, packs: int) -> None:
        for session in sessions:
            session.training.watch("evaluating", session.step, f"{done} of {packs} packs")

    return evaluate_together(
        asking(sessions), [training.parts for training in trainings], trainings[0].held_out,
        [training.held_out_picks for training in trainings], on_pack,
    )  # fmt: skip
