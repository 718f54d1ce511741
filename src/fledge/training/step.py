"""One optimizer step. Together with `fit.py` this is the core of training.

The gradient is that of one big batch, however it is split: every micro-batch's loss is a sum
divided by the number of charged elements over all micro-batches and ranks, and so is the mean
acceptance that LK-lambda weights by. Nothing here synchronizes with the device.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fledge.core.batch import Eagle3TargetBatch
from fledge.core.distributed import World
from fledge.core.rows import TokenBatch
from fledge.core.transfer import Fetched, record_event
from fledge.methods.shared.objective import Objective, RolloutOutput
from fledge.target.base import Eagle3TargetBackend
from fledge.target.finite_check import Verdict, inspect
from fledge.training.batches import StepBatch
from fledge.training.optimizer import Skipping, StepGuard, clip_gradients
from fledge.training.recorded_steps import RecordedSteps
from fledge.training.sharding import backward, whole


class Clock:
    """Seconds per named phase since the last reading, without synchronizing with the device: on a
    GPU by CUDA events, which are read only then."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self._gpu is not None:
            begin = record_event(self._gpu, timed=True)
            yield
            self._events.append((name, begin, record_event(self._gpu, timed=True)))
        else:
            start = time.perf_counter()
            yield
            self._add(name, time.perf_counter() - start)

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def read(self) -> tuple[float, dict[str, float]]:
        """(wall seconds, seconds per phase) since the last reading; waits for the device."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        for name, begin, end in self._events:
            self._add(name, begin.elapsed_time(end) / 1000)
        now = time.perf_counter()
        wall, phases = now - self._since, self._seconds
        self._since, self._seconds, self._events = now, {}, []
        return wall, phases


@dataclass
class Models:
    """What evaluation needs: a target, and the objective that holds the draft."""

    target: Eagle3TargetBackend
    objective: Objective[Any]  # only it sees the type that it prepares and scores
    device: torch.device
    world: World
    clock: Clock


@dataclass
class Parts(Models):
    """What a training step needs on top of that."""

    parameters: list[nn.Parameter]  # the trainable ones
    optimizers: tuple[Skipping, ...]
    guard: StepGuard
    clip: float | None
    seed: int = 0
    recorded: RecordedSteps | None = None  # for drafts whose steps are bound by kernel launches


@dataclass
class Sums:
    """Metrics as sums and counts on the device; names that end in _K are per depth."""

    loss: Tensor  # this rank's share of the step's loss
    loss_K: Tensor
    charged_K: Tensor
    correct_K: Tensor
    valid_K: Tensor  # slots supervised at all depths up to k
    reached_K: Tensor  # ... and correct at all depths before k
    hits_K: Tensor  # ... and correct at k too

    @classmethod
    def zeros(cls, depths: int, device: torch.device) -> "Sums":
        counts = [torch.zeros(depths, dtype=torch.int64, device=device) for _ in range(5)]
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return cls(zero, torch.zeros(depths, dtype=torch.float64, device=device), *counts)

    def add(self, output: RolloutOutput) -> None:
        """Add one micro-batch's output."""
        self.loss += output.loss.detach()
        self.loss_K += output.loss_sums
        self.charged_K += output.charged
        self.correct_K += output.correct
        self.valid_K += output.step_valid
        self.reached_K += output.step_reached
        self.hits_K += output.step_prefix_hits

    def __iadd__(self, other: "Sums") -> "Sums":
        for metric in fields(self):
            getattr(self, metric.name).add_(getattr(other, metric.name))
        return self

    def over(self, world: World) -> "Sums":
        """The sums over all ranks."""
        return Sums(*(world.sum_(getattr(self, metric.name).clone()) for metric in fields(self)))


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step. Everything stays on the device except `flags`, which is read back
    after every step."""

    sums: Sums
    grad_norm: Tensor
    bad: Tensor  # the step was skipped
    verdicts: tuple[Verdict, ...]  # on the target's answers to this rank
    bad_in_a_row: Tensor
    flags: Fetched  # [2] int64: whether the step was skipped; ranks that were asked to stop


def answers_of(
    parts: Models, batch: StepBatch, *, features: bool = False
) -> Iterator[tuple[TokenBatch, Eagle3TargetBatch]]:
    """Yield this rank's micro-batches, each with the target's answer, or just its `features`. For a
    missing micro-batch the rank still joins the target's pass, which other ranks may depend on."""
    ask = parts.target.features if features else parts.target.answer
    futures = None if batch.answers is None else iter(batch.answers)
    for rows in batch.micro:
        with parts.clock.phase("target"):
            if rows is None:
                if futures is None:
                    parts.target.join()
                continue
            answer = ask(rows) if futures is None else next(futures).result()
            answer = answer.to(parts.device, non_blocking=True)
        yield rows, answer
        del answer


def train_step(parts: Parts, batch: StepBatch, *, lr: float, stopping: bool = False) -> StepResult:
    """Ask the target, count globally, run forward and backward per micro-batch, clip, update."""
    world = parts.world
    # One seed per step, so that random draws for a document do not depend on ranks or packing.
    seed = parts.seed + 1_000_003 * batch.step
    passes = _recorded_passes if _recordable(parts, batch) else _eager_passes
    sums, counts, verdicts = passes(parts, batch, seed, stopping=stopping)
    with parts.clock.phase("update"):
        if world.shard == 1:
            world.sum_gradients(parts.parameters)
        # The recorded update reads gradients from the addresses that recorded passes write to.
        update = _recorded_update if passes is _recorded_passes else _update
        norm, bad = update(parts, lr, counts[-2] > 0)
        for optimizer in parts.optimizers:
            optimizer.zero_grad(set_to_none=True)
    flags = Fetched(torch.stack([bad.long(), counts[-1]]))
    return StepResult(sums, norm, bad, tuple(verdicts), parts.guard.bad_in_a_row.clone(), flags)


def _update(parts: Parts, lr: float | Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
    """Clip, judge, update; return the gradient norm and whether the step was skipped."""
    norm = clip_gradients(parts.optimizers, parts.parameters, parts.clip)
    bad = parts.guard.judge(norm, broken=broken)
    for optimizer in parts.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.found_inf = bad.float()  # above 0 skips the step
        optimizer.step()
    return norm, bad


def _recorded_update(parts: Parts, lr: float, broken: Tensor) -> tuple[Tensor, Tensor]:
    assert parts.recorded is not None
    grads = [p.grad for p in parts.parameters if p.grad is not None]
    changed = [parts.guard.bad_in_a_row, *grads]  # all that a bad step writes to
    return parts.recorded.update(partial(_update, parts), lr, broken, changed=changed)


# [K + 2]: charged elements per depth, non-finite answers, ranks that were asked to stop
Counts = Tensor


def _eager_passes(
    parts: Parts, batch: StepBatch, seed: int, *, stopping: bool
) -> tuple[Sums, Counts, list[Verdict]]:
    """Prepare all micro-batches, sum their charged elements, then run them one after another."""
    objective, world = parts.objective, parts.world
    layers = objective.draft_model.config.num_aux_hidden_states
    prepared, verdicts = [], []
    for rows, answer in answers_of(parts, batch, features=not objective.reads_target):
        with parts.clock.phase("supervision"):
            # Planned from host masks, while the GPU is still running the target.
            prepared.append(objective.prepare(rows, answer, seed))
        verdicts.append(inspect(answer, layers))  # on the device; read after the step
        del answer  # under context parallelism, `prepare` has kept only this rank's part
    counts = _count(parts, [ready.charged_K for ready in prepared], verdicts, stopping=stopping)
    world.sum_(counts)
    sums = Sums.zeros(objective.depths, parts.device)
    with whole(objective.draft_model):
        with parts.clock.phase("forward"):
            totals = objective.totals(prepared, world)
        for ready in prepared:
            with parts.clock.phase("forward"):
                output = objective.score(ready, counts[:-2], totals)
            with parts.clock.phase("backward"):
                backward(objective.draft_model, output.loss)
            sums.add(output)
        for _ in range(len(batch.micro) - len(prepared)):
            backward(objective.draft_model, None)
    return sums, counts, verdicts


def _recorded_passes(
    parts: Parts, batch: StepBatch, seed: int, *, stopping: bool
) -> tuple[Sums, Counts, list[Verdict]]:
    """Run the step's only micro-batch as a recorded CUDA graph."""
    objective = parts.objective
    assert parts.recorded is not None
    [(rows, answer)] = answers_of(parts, batch, features=not objective.reads_target)
    with parts.clock.phase("supervision"):
        plan = parts.recorded.plan(rows, seed)
    with parts.clock.phase("forward"):
        output = parts.recorded(plan, answer)
    verdicts = [inspect(answer, objective.draft_model.config.num_aux_hidden_states)]
    sums = Sums.zeros(objective.depths, parts.device)
    sums.add(output)
    return sums, _count(parts, [output.charged], verdicts, stopping=stopping), verdicts


def _recordable(parts: Parts, batch: StepBatch) -> bool:
    single = parts.world.size == 1 and len(batch.micro) == 1 and batch.micro[0] is not None
    return single and parts.recorded is not None


def _count(
    parts: Parts, charged: Sequence[Tensor], verdicts: Sequence[Verdict], *, stopping: bool
) -> Counts:
    counts = torch.zeros(parts.objective.depths + 2, dtype=torch.int64, device=parts.device)
    for charged_K in charged:
        counts[:-2] += charged_K
    for verdict in verdicts:
        counts[-2] += verdict.broken
    counts[-1].fill_(int(stopping))  # assigning a Python number would synchronize
    return counts
