"""What a rank of a run needs: memory, computed from shapes (exact for what is kept between steps,
counted for what a step needs on top), and seconds per token on this machine.

`prediction.py` uses it for a run that is set up, `shape_plan.py` for one that is only a recipe.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch, TokenRow
from fledge.data.pack import Piece, collate
from fledge.decode.strategy import rollouts_of
from fledge.measure.replay import replay_held_out, target_picks
from fledge.methods.shared.draft import DraftModel
from fledge.target.finite_check import NotFinite
from fledge.target.state_cache import colocated
from fledge.training.optimizer import trained_by_muon
from fledge.training.planning.step_cost import MetaStep, StepCost
from fledge.training.sharding import whole

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe
    from fledge.recipe.sections import Training as TrainingSection
    from fledge.training.setup import Training

USABLE = 0.92  # share of a GPU's memory; the rest is its context, libraries and fragmentation


@dataclass(frozen=True)
class DraftMemory:
    """A draft's parameters, and what is kept beside them between steps."""

    trained: int  # parameters
    frozen: int
    kept: int  # bytes of AdamW's two moments or Muon's one, and of the averaged weights

    @classmethod
    def of(cls, draft: nn.Module, training: "TrainingSection") -> "DraftMemory":
        trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
        muon = trained_by_muon(draft).values() if training.optimizer == "muon" else ()
        average = 0 if training.ema is None else 4 * trained
        kept = 8 * trained - 4 * sum(p.numel() for p in muon) + average
        return cls(trained, sum(p.numel() for p in draft.parameters()) - trained, kept)

    @property
    def saved_bytes(self) -> int:
        """The size of a checkpoint."""
        return 4 * (self.trained + self.frozen) + self.kept

    def bytes(self, *, shard: int = 1, width: int = 4) -> int:
        """Bytes of weights, gradients, and what is kept. During a step, sharded ranks also hold the
        whole weights, in the dtype of the step, and the whole gradients."""
        if shard == 1:
            return 8 * self.trained + self.kept + 4 * self.frozen
        whole = (width + 4) * self.trained + 4 * self.frozen
        return (4 * self.trained + self.kept) // shard + whole


@dataclass(frozen=True)
class StepMemory:
    """What one step needs on top: what the draft keeps, and the target's answers."""

    step: MetaStep
    rows: TokenBatch  # a micro-batch
    cost: StepCost  # of a step on it
    accumulate: int
    splits_rows: bool  # several ranks can share the rows

    @classmethod
    def of(
        cls,
        draft: DraftModel,  # on the meta device
        batches: Sequence[TokenBatch],
        recipe: "Recipe",
        dtype: torch.dtype = torch.bfloat16,
    ) -> "StepMemory":
        """From micro-batches, of which the largest counts."""
        step = MetaStep(recipe.method, draft, recipe.objective.options(), dtype)
        costs = zip(map(step.training, batches), batches, strict=True)
        cost, rows = max(costs, key=lambda pair: pair[0].bytes)
        return cls(step, rows, cost, recipe.training.accumulate, recipe.method.splits_rows)

    def bytes(self, context: int = 1) -> int:
        """Bytes on one rank, if `context` ranks share their rows. Two copies of an answer exist
        while it is made; of the target's states and its own activations, a rank keeps its part,
        but depth-0 keys and values of all tokens."""
        answer = self.step.answer_bytes(self.rows.tokens)
        if context == 1 or not self.splits_rows:
            return int(self.cost.bytes + 2 * answer * self.accumulate)
        part = _part(self.rows, context)
        kept = self.step.training(part).bytes + self.step.key_bytes(self.rows.tokens - part.tokens)
        return int(kept + 2 * answer + answer * self.accumulate / context)


def _part(rows: TokenBatch, context: int) -> TokenBatch:
    """Rows like these with one `context`-th of the tokens."""
    count, width = rows.shape
    document = width if rows.seq_lens is None else int(rows.seq_lens.max())
    supervised = float(rows.loss_mask.sum() / rows.attention_mask.sum())
    return typical_rows(count, -(-width // context), document=document, supervised=supervised)


def context_needed(step: StepMemory, free_bytes: float) -> int | None:
    """The smallest power of two of ranks over which a step fits; None if 64 are too few."""
    sizes = (2**power for power in range(7))
    return next((size for size in sizes if step.bytes(size) <= free_bytes), None)


# --- rows -----------------------------------------------------------------------------------------
# The rows whose steps are counted: some of a run's own or, where no data is read, typical ones.

SUPERVISED = 0.8  # a typical share of the tokens
_SAMPLED = 2  # micro-batches of a run


def sampled_rows(training: "Training") -> list[TokenBatch]:
    """The first micro-batches of this rank; typical ones if it has none."""
    recipe, stream = training.recipe, training.stream
    batches = islice(stream.micro_batches_before(stream.steps), _SAMPLED)
    return [collated() for collated in batches] or [
        typical_rows(recipe.training.micro_batch, stream.tokens, document=recipe.data.max_length)
    ]


def typical_rows(
    rows: int, tokens: int, *, document: int, supervised: float = SUPERVISED
) -> TokenBatch:
    """`rows` packs of `tokens` tokens, with documents of this length that end in an answer."""
    lengths = np.diff([*range(0, tokens, document), tokens]).tolist()
    documents = [_document(length, supervised) for length in lengths]
    pack = tuple(Piece(row, 0, length) for row, length in enumerate(lengths))
    return collate(documents, [pack] * rows, tokens, pad_id=0)


def _document(length: int, supervised: float) -> TokenRow:
    answer = np.arange(length) >= round(length * (1 - supervised))
    return TokenRow(np.zeros(length, np.int32), answer.astype(np.uint8), "", truncated=False)


# --- pace -----------------------------------------------------------------------------------------
# Estimates the speed of a run's computations on this machine, in seconds per token.
#
# On a CPU, a short trial on a few rows of the run is timed: its speed depends on its cores, and on
# what else uses them. A GPU would first compile for minutes, so its speed is taken from a rate that
# was measured on whole steps, not from a data sheet. A target inside an engine is timed even there:
# it compiles nothing, and does not reveal how many weights it has or over how many GPUs they are
# split.

# Operations per second, measured on whole steps (CPU: per thread, float32; H200: 0.43 s per step of
# the 8B shape, 0.15 s of the 135M shape).
RATES = {"cpu": 55e9, "cuda": 600e12}
_TRIAL_TOKENS, _TRIAL_ROWS = 256, 64  # approximate size of a trial, and rows that it is chosen from


@dataclass(frozen=True)
class Pace:
    """Seconds per token."""

    target_s: float  # the target's forward
    step_s: float  # the draft's rollouts, forward and backward
    replay_s: float  # the draft's rollouts in an evaluation, scored and replayed
    picks_s: float  # the target's picks on held-out rows, computed once per run


def pace_of(training: "Training", step: StepMemory) -> Pace:
    """The pace of a run: by a trial on a CPU with a synchronous target, otherwise from the number
    of operations and the measured rate."""
    parts = training.parts
    by_trial = None
    if parts.device.type == "cpu" and not parts.target.supports_async:
        by_trial = _pace_by_trial(training)
    if by_trial is None and parts.target.inside_engine:
        return replace(_pace_by_rate(training, step), target_s=_engine_s(training))
    return by_trial or _pace_by_rate(training, step)


def target_weights(training: "Training") -> list[nn.Parameter]:
    """The parameters of a target in this process; empty for a target that runs elsewhere."""
    module = training.parts.target.info().module
    return [] if module is None else list(module.parameters())


def _pace_by_rate(training: "Training", step: StepMemory) -> Pace:
    """From the number of operations on the run's first rows; of the target, without attention."""
    parts, info, kind = training.parts, training.parts.target.info(), training.parts.device.type
    rate = RATES[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    tokens = int(step.rows.attention_mask.sum())  # without padding
    supervised = float(step.rows.loss_mask.sum())
    target = sum(p.numel() for p in target_weights(training) if p.ndim == 2)
    return Pace(
        target_s=2 * target / rate,
        step_s=step.cost.operations / tokens / rate / parts.world.context,
        replay_s=step.step.evaluation(step.rows) / tokens / rate,
        picks_s=2 * supervised / tokens * info.vocab_size * info.hidden_size / rate,
    )


def _pace_by_trial(training: "Training") -> Pace | None:
    """From a timed trial; None if the target fails, which the run itself will report better."""
    batch, draft = _trial_batch(training), training.draft
    was_training = draft.training
    try:
        with torch.random.fork_rng(devices=[]), whole(training.draft):
            _run_trial(training, batch)  # warm-up: the first passes of a process are slow
            return _run_trial(training, batch)
    except (NotFinite, TargetUnreachable):
        return None
    finally:
        draft.train(was_training)
        for parameter in training.parts.parameters:
            parameter.grad = None


def _engine_s(training: "Training") -> float:
    """Seconds per token of an engine's answer, timed on a pack of full size, because a small one
    would not fill a GPU; 0 if the target fails, as above."""
    target = training.parts.target
    batch = _trial_batch(training, tokens=training.stream.tokens)
    try:
        target.answer(batch)
        _synchronize(training.parts.device)
        begin = time.perf_counter()
        target.answer(batch)
        _synchronize(training.parts.device)
    except (NotFinite, TargetUnreachable):
        return 0.0
    return (time.perf_counter() - begin) / batch.tokens


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _trial_batch(training: "Training", *, tokens: int = _TRIAL_TOKENS) -> TokenBatch:
    """One pack of rows near the median length."""
    rows = training.stream.rows
    lengths = np.asarray(rows.lengths[:_TRIAL_ROWS])
    pack: list[Piece] = []
    for row in np.argsort(abs(lengths - int(np.median(lengths))), kind="stable").tolist():
        if sum(map(len, pack)) < tokens:
            pack.append(Piece(row, 0, int(lengths[row])))
    return collate(rows, [tuple(pack)], sum(map(len, pack)), training.pad_id)


def _run_trial(training: "Training", batch: TokenBatch) -> Pace:
    """Do with a pack what a step and an evaluation do; keep only the times."""
    parts, objective = training.parts, training.parts.objective
    # Bypass the states that a target keeps in memory: those belong to the run.
    target = colocated(parts.target) or parts.target
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    training.draft.train()
    answer = target.answer(batch).to(parts.device)
    mark()
    ready = objective.prepare(batch, answer, seed=0)
    objective.score(ready, ready.charged_K).loss.backward()  # type: ignore[no-untyped-call]
    mark()
    training.draft.eval()
    with torch.no_grad():
        rollouts = rollouts_of(training.draft, objective.depths, dtype=objective.compute_dtype)
        head = target.info().head.to(parts.device)
        picks_S = target_picks(answer, batch, head, rollouts.selected_token_ids)
        mark()
        objective.score(objective.prepare(batch, answer, seed=0), ready.charged_K)
        replay_held_out(answer, batch, rollouts, picks_S)
        mark()
    target_s, step_s, picks_s, replay_s = np.diff(marks) / batch.tokens
    return Pace(float(target_s), float(step_s), float(replay_s), float(picks_s))
