"""Which rows made a step bad, over all ranks. Steps are judged by `StepGuard` (`optimizer.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fledge.core.rows import TokenBatch
from fledge.core.text import counted
from fledge.target.finite import NotFinite, module_of, place_of, refusal
from fledge.train.batches import StepBatch
from fledge.train.step import StepResult

if TYPE_CHECKING:
    from fledge.train.setup import Training


@dataclass(frozen=True)
class BadStep:
    """What a message about a bad step says."""

    documents: str  # how many it was computed from, on which ranks, and the first ones
    first_places: str
    broken: NotFinite | None  # the error about the target's answer, if that is the cause


@dataclass(frozen=True)
class _Share:
    """One rank's share of a bad step."""

    rank: int
    data_rank: int
    places: tuple[str, ...]  # of its documents
    finite: bool  # its loss
    broken: NotFinite | None  # about the target's answers to it


def describe_bad_step(training: "Training", batch: StepBatch, result: StepResult) -> BadStep:
    """Describe a bad step by the rows of the ranks that made it bad. All ranks must call this."""
    world, micro = training.parts.world, [rows for rows in batch.micro if rows is not None]
    places = tuple(place for rows in micro for pack in rows.places for place in pack)
    finite, broken = bool(result.sums.loss.isfinite()), _not_finite(training, micro, result)
    shares = world.gathered(_Share(world.rank, world.data_rank, places, finite, broken))
    blamed = _blamed(shares)
    # ranks that share their rows name them once
    by_data_rank = {share.data_rank: share.places for share in blamed}
    all_places = [place for places in by_data_rank.values() for place in places]
    ranks = "rank " if len(blamed) == 1 else "ranks "
    ranks += ", ".join(str(share.rank) for share in blamed)
    on_ranks = f" on {ranks}" if len(blamed) < len(shares) else ""
    begin, first = "begins" if len(all_places) == 1 else "begin", ", ".join(all_places[:3])
    documents = f"its {counted(len(all_places), 'document')}{on_ranks} {begin} with {first}"
    return BadStep(documents, first, blamed[0].broken)


def _blamed(shares: list[_Share]) -> list[_Share]:
    """The ranks whose answers are not finite, else those whose loss is not; all of them if only the
    sum of their gradients is bad."""
    broken = [share for share in shares if share.broken is not None]
    return broken or [share for share in shares if not share.finite] or shares


def _not_finite(
    training: "Training", micro: Sequence[TokenBatch], result: StepResult
) -> NotFinite | None:
    """The error that describes the non-finite answers of a bad step; None when this rank's answers
    are finite."""
    target, config = training.parts.target, training.draft.config
    for rows, verdict in zip(micro, result.verdicts, strict=True):
        fault = verdict.fault(config.aux_layer_ids)
        if fault is not None:
            place, model = place_of(rows, fault), module_of(target)
            return refusal(fault, dtype=verdict.dtype, place=place, model=model)
    return None
