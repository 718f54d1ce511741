"""Several drafts in one pass: the target is asked once per batch, and every draft takes a step.

Each draft is a run of its own, and its directory holds what it would hold had it been trained
alone, bit for bit. The drafts share the target, which provides all aux layers that any of them uses
(`target/base.py`), and the rows in their order. Each has its own weights, optimizer,
schedule, metrics, checkpoints and random generators. A killed run may leave them at different
steps: those that are ahead wait until the others have caught up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fledge.target.base import Eagle3TargetBackend, behind_view, finished, narrowed
from fledge.training.batches import StepBatch
from fledge.training.clock import Clocks
from fledge.training.evaluate import evaluate_together
from fledge.training.step import Parts, answers_of

if TYPE_CHECKING:
    from fledge.training.session import Session
    from fledge.training.setup import Training


def target_of(trainings: Sequence["Training"]) -> Eagle3TargetBackend:
    """The target that all drafts share; for a single draft, its own."""
    target = trainings[0].parts.target
    return target if len(trainings) == 1 else behind_view(target)


def asking(sessions: Sequence["Session"]) -> Parts:
    """The parts that ask the target for all drafts: those of the only draft, or those of the first
    one with the shared target."""
    parts = sessions[0].parts
    if len(sessions) == 1:
        return parts
    target = target_of([session.training for session in sessions])
    clock = Clocks([session.parts.clock for session in sessions], parts.device)
    return replace(parts, target=target, clock=clock)


def shares(
    asking: Parts, batch: StepBatch, sessions: Sequence["Session"]
) -> Iterator[tuple["Session", StepBatch]]:
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


def evaluate(
    sessions: Sequence["Session"], stopping: Callable[[], bool] = lambda: False
) -> list[dict[str, Any]]:
    """Held-out acceptance of each of several drafts, from one answer per pack."""
    trainings = [session.training for session in sessions]

    def on_pack(done: int, packs: int) -> None:
        for session in sessions:
            session.training.watch("evaluating", session.step, f"{done} of {packs} packs")

    return evaluate_together(
        asking(sessions), [training.parts for training in trainings], trainings[0].held_out,
        [training.held_out_picks for training in trainings], on_pack, stopping,
    )  # fmt: skip
