"""How fast a run's own arithmetic is on this machine, in seconds a token.

A CPU is tried out for a moment, on a few rows of the run: how fast it is depends on its cores, and
on who else uses them. A GPU would first compile for minutes, so it is taken at a rate that was
measured on whole steps, not at a data sheet's; but an engine is asked, for it compiles nothing, and
hides how many weights it has, over how many GPUs.
"""

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fledge.core.errors import TargetUnreachable
from fledge.core.rows import TokenBatch
from fledge.data.pack import Piece, collate
from fledge.decode.strategies.registry import rollouts_of
from fledge.measure.packed import target_picks
from fledge.measure.replay import replay_held_out
from fledge.objective.work import SUPERVISED, Work
from fledge.target.finite import NotFinite
from fledge.target.remember import colocated
from fledge.train.sharding import whole

if TYPE_CHECKING:
    from fledge.train.setup import Training

# Operations per second on whole steps (a CPU's per thread, float32; H200: 8B shape 0.43 s, 135M
# shape 0.15 s a step).
RATES = {"cpu": 55e9, "cuda": 600e12}
_TRIAL_TOKENS, _TRIAL_ROWS = 256, 64  # about so many tokens, out of the first rows


@dataclass(frozen=True)
class Pace:
    """Seconds a token."""

    target_s: float  # the target's forward
    step_s: float  # the draft's rollouts, forward and backward
    replay_s: float  # the draft's rollouts in an evaluation, scored and replayed
    picks_s: float  # the target's choice of held-out tokens, which is made once


def pace_of(training: "Training") -> Pace:
    """By a trial on a CPU, where the target answers at once; else by operations and rate."""
    parts = training.parts
    tried = None
    if parts.device.type == "cpu" and not parts.target.supports_async:
        tried = _tried(training)
    if tried is None and parts.target.inside_engine:
        return replace(_by_rate(training), target_s=_asked(training))
    return tried or _by_rate(training)


def target_weights(training: "Training") -> list[nn.Parameter]:
    """Those of a target in this process; others run elsewhere."""
    module = training.parts.target.info().module
    return [] if module is None else list(module.parameters())


def work_of(training: "Training") -> Work:
    """What a step of the run computes and keeps."""
    recipe = training.recipe
    return recipe.method.work(training.draft, recipe.objective)


def _by_rate(training: "Training") -> Pace:
    """By operations, as `objective/work.py` counts them; attention is left out."""
    parts, work = training.parts, work_of(training)
    kind = parts.device.type
    rate = RATES[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    target = sum(p.numel() for p in target_weights(training) if p.ndim == 2)
    head = parts.target.info().vocab_size * work.config.target_hidden_size
    return Pace(
        target_s=2 * target / rate,
        step_s=work.step() / rate / parts.world.context,
        replay_s=(work.scored() + work.replayed()) / rate,
        picks_s=2 * SUPERVISED * head / rate,
    )


def _tried(training: "Training") -> Pace | None:
    """None: the target does not answer soundly, which the run itself will say better."""
    batch = _few_rows(training)
    try:
        with torch.random.fork_rng(devices=[]), whole(training.draft):
            _try(training, batch)  # the first passes of a process are slow and must not count
            return _try(training, batch)
    except (NotFinite, TargetUnreachable):
        return None
    finally:
        for parameter in training.parts.parameters:
            parameter.grad = None


def _asked(training: "Training") -> float:
    """Seconds a token of an engine: a pack as the run's own, for a small one does not fill a GPU.
    0: it does not answer soundly, as above."""
    target = training.parts.target
    batch = _few_rows(training, tokens=training.stream.tokens)
    try:
        target.answer(batch)
        _finish(training.parts.device)
        begin = time.perf_counter()
        target.answer(batch)
        _finish(training.parts.device)
    except (NotFinite, TargetUnreachable):
        return 0.0
    return (time.perf_counter() - begin) / batch.tokens


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _few_rows(training: "Training", *, tokens: int = _TRIAL_TOKENS) -> TokenBatch:
    """One pack of rows of a usual length."""
    rows = training.stream.rows
    lengths = np.asarray(rows.lengths[:_TRIAL_ROWS])
    pack: list[Piece] = []
    for row in np.argsort(abs(lengths - int(np.median(lengths))), kind="stable").tolist():
        if sum(map(len, pack)) < tokens:
            pack.append(Piece(row, 0, int(lengths[row])))
    return collate(rows, [tuple(pack)], sum(map(len, pack)), training.pad_id)


def _try(training: "Training", batch: TokenBatch) -> Pace:
    """What a step and an evaluation do with a pack; nothing is kept but the time."""
    parts, objective = training.parts, training.parts.objective
    target = colocated(parts.target) or parts.target  # its memory is the run's own
    marks = [time.perf_counter()]

    def mark() -> None:
        marks.append(time.perf_counter())

    answer = target.answer(batch).to(parts.device)
    mark()
    ready = objective.prepare(batch, answer, seed=0)
    objective.score(ready, ready.charged_K).loss.backward()  # type: ignore[no-untyped-call]
    mark()
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
