"""A run during training: its state, and what happens around each step.

`fit.py` is the loop. This module resumes, checks a step's verdict, logs, records an evaluation, and
saves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fledge.core.errors import BadInput
from fledge.core.files import write_json
from fledge.core.machine import MACHINE_NAME, describe_machine
from fledge.core.rows import TokenBatch
from fledge.core.terminal import counted
from fledge.recipe.schema import Recipe
from fledge.target.finite_check import NotFinite, place_of, refusal
from fledge.training import checkpoint as checkpoints
from fledge.training import metrics, saving
from fledge.training.batches import StepBatch
from fledge.training.runs import save_prompts
from fledge.training.setup import Training
from fledge.training.step import StepResult, Sums

_MIN_LENGTH = 1.0005  # the smallest acceptance length that is not displayed as 1.000


class Observer(Protocol):
    """An observer of a run: the command line, a test, a notebook."""

    def note(self, text: str) -> None: ...
    def logged(self, values: dict[str, Any]) -> None: ...
    def evaluated(self, values: dict[str, Any]) -> None: ...


@dataclass
class State:
    """Everything that changes during a run, apart from weights and optimizer moments."""

    step: int = 0
    seconds: float = 0.0  # spent training, over all resumptions
    best_length: float = 0.0  # held-out acceptance length, by replay
    best_step: int = 0  # step at which it was measured; 0: not yet
    first: dict[str, Any] = field(default_factory=dict)  # held-out acceptance before training
    last: dict[str, Any] = field(default_factory=dict)  # the latest held-out acceptance

    @classmethod
    def of(cls, checkpoint: checkpoints.Checkpoint) -> "State":
        saved = checkpoint.state
        return cls(**{name: saved[name] for name in vars(cls()) if name in saved})


@dataclass(frozen=True)
class Outcome:
    state: State
    finished: bool
    signal: int = 0  # the signal that ended it early
    already: bool = False  # the run had finished before, so nothing was trained
    warnings: tuple[str, ...] = ()  # signs that the run is not what the user intended


class Session:
    """A run, continued from its newest checkpoint if there is one."""

    def __init__(self, training: Training, observer: Observer) -> None:
        self.training, self.parts, self.observer = training, training.parts, observer
        for line in training.warnings:
            observer.note(f"warning: {line}")
        self.state, self._window = resume(training, observer)
        self._saved = self.state.step
        self._was_finished = self._is_finished
        self._pending: tuple[StepBatch, StepResult] | None = None
        main = self.parts.world.is_main
        self._logs = Logs(training, observer, self.state.step) if main else None

    @property
    def step(self) -> int:
        """The number of completed steps."""
        return self.state.step

    @property
    def _at_end(self) -> bool:
        return self.state.step == self.training.stream.steps

    @property
    def _is_finished(self) -> bool:
        return self._at_end and not self.evaluation_missed

    def stepped(self, batch: StepBatch, result: StepResult, lr: float) -> bool:
        """Record a step and check the one before it, which avoids waiting for the device. Returns
        True when all ranks have been informed of a request to stop."""
        self.state.step += 1
        self._window += result.sums
        stopping = self.read()
        self._pending = (batch, result)
        if self._at_end or self.state.step % self.training.recipe.tracking.every_steps == 0:
            self._log(result, lr, batch.epoch)
            self._window = Sums.zeros(self.parts.objective.depths, self.parts.device)
        return stopping

    def read(self) -> bool:
        """Check the pending step: report it if it was skipped, raise after too many skipped steps
        in a row, and return whether any rank was asked to stop."""
        if self._pending is None:
            return False
        batch, result = self._pending
        bad, stop = result.flags.read().tolist()
        if bad:
            self._skipped(batch, result)
        return bool(stop)

    def _skipped(self, batch: StepBatch, result: StepResult) -> None:
        training, norm = self.training, float(result.grad_norm)
        places, broken = bad_rows(training, batch, result)
        cause = f"gradient norm {norm:.3g}"
        if math.isfinite(norm):
            median = float(training.parts.guard.median())
            cause += f", {norm / median:.0f} times the recent median"
        cause += f"; {counted(len(places), 'document')}: {', '.join(places[:3])}"
        cause += ", ..." if len(places) > 3 else ""
        self.observer.note(
            f"step {batch.step + 1} skipped: {cause}" + (f"; {broken.what}" if broken else "")
        )
        limit = training.recipe.training.max_bad_steps
        if int(result.bad_in_a_row) >= limit:
            where, what = str(training.directory), f"{limit} steps in a row were skipped"
            if broken is not None:  # neither the draft nor the learning rate is the cause
                raise NotFinite(f"{what}: {broken.what}", where=where, fix=broken.fix)
            fix = "lower training.lr, raise training.spike_factor, or look at these rows; "
            fix += "the last checkpoint is intact"
            raise BadInput(f"{what} (the last one: {cause})", where=where, fix=fix)

    def _log(self, result: StepResult, lr: float, epoch: int) -> None:
        """Write one line of metrics about the steps since the last line."""
        parts, stream, state, logs = self.parts, self.training.stream, self.state, self._logs
        sums = self._window.over(parts.world)
        wall, phases = parts.clock.read()
        state.seconds += wall
        if logs is None:
            return
        steps, timed = state.step - logs.last_step, state.step - logs.timed_from
        logs.last_step = logs.timed_from = state.step
        tokens = timed * stream.packs_per_step * stream.tokens
        logs.write(
            {
                "step": state.step,
                "epoch": epoch,
                "loss": float(sums.loss) / max(1, steps),
                "lr": lr,
                "grad_norm": float(result.grad_norm),
                **metrics.acceptance_metrics(sums),
                "tokens_per_s": tokens / wall if wall else 0.0,
                "padding_share": stream.padding_share,
                "target_share": phases.get("target", 0.0) / wall if wall else 0.0,
                "seconds": state.seconds,
            }
        )

    # --- evaluation -----------------------------------------------------------------------------

    @property
    def evaluation_due(self) -> bool:
        every = self.training.recipe.evaluation.every_steps
        due = self._at_end or self.state.step % every == 0
        return due and bool(self.training.held_out)

    @property
    def evaluation_missed(self) -> bool:
        """Whether an evaluation is due at this step and missing: the one before the first step, or
        one that was interrupted: the target became unreachable, or the run was to stop."""
        return self.evaluation_due and self.state.last.get("step") != self.state.step

    def evaluated(self, evaluation: dict[str, Any]) -> bool:
        """Record held-out acceptance; return whether it is the best so far."""
        state = self.state
        self.parts.clock.read()  # keeps evaluation time out of the training speed
        state.last = {"step": state.step, **evaluation}
        if self._logs is not None:
            self._logs.evaluated({"step": state.step, "evaluation": evaluation})
        if state.step == 0:
            state.first = state.last
        if state.step == 0 or evaluation["acceptance_length"] <= state.best_length:
            return False
        state.best_length, state.best_step = evaluation["acceptance_length"], state.step
        return True

    # --- saving, ending -------------------------------------------------------------------------

    def save_if_due(self, *, best: bool, stopping: bool) -> None:
        """Save on cadence, when the draft is the best so far, and at the end or before a stop."""
        cadence = self.training.recipe.checkpoint.every_steps
        if best or self._at_end or stopping or self.state.step % cadence == 0:
            self.save(best=best)

    def save(self, *, best: bool = False) -> None:
        training, state, world = self.training, self.state, self.parts.world
        training.watch("saving", state.step, training.stream.steps)
        path = saving.save(training, vars(state), self._window)
        if world.is_main:
            if best:
                checkpoints.mark_best(training.directory, path)
            checkpoints.prune(training.directory, training.recipe.checkpoint.keep)
        world.barrier()
        self._saved = state.step

    def stop_here(self) -> None:
        """Save and report where the run stopped. Only called between two steps, when the target is
        unreachable or a stop was requested, so no step is left half done."""
        if self.state.step > self._saved:
            self.save()
        stopped = f"stopped after step {self.state.step}"
        self.observer.note(f"{stopped}; the same command continues the run")

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()

    def outcome(self, signal: int) -> Outcome:
        training, state, finished = self.training, self.state, self._is_finished
        assert self._saved == state.step
        warnings = [*training.warnings, *(in_vain(training.recipe, state) if finished else ())]
        return Outcome(state, finished, signal, self._was_finished, tuple(warnings))


def in_vain(recipe: Recipe, state: State) -> list[str]:
    """A warning if a finished run's best draft is no better than none, or than before training."""
    before, best = state.first.get("acceptance_length"), state.best_length
    if not state.last.get("rounds"):
        return []
    if best < _MIN_LENGTH:
        length = f"{best:.3f}, equal to no draft at all"
    elif before is not None and best <= before:
        length = f"{best:.3f}, and {before:.3f} before training"
    else:
        return []
    what = f"the draft learned nothing: held-out acceptance length {length}"
    lr = recipe.training.lr
    return [f"{what}; is training.lr ({lr:g}) too high, or the data too little?"]


def resume(training: Training, observer: Observer) -> tuple[State, Sums]:
    """Continue from the newest intact checkpoint, or start a run: write recipe and vocabulary."""
    parts, directory = training.parts, training.directory
    window = Sums.zeros(parts.objective.depths, parts.device)
    checkpoint, complaints = saving.newest(training)
    for complaint in complaints:
        observer.note(f"passing over a checkpoint: {complaint}")
    if parts.world.is_main and not training.vocabulary_path.exists():
        training.recipe.write_resolved(directory)
        write_json(directory / MACHINE_NAME, describe_machine())
        save_prompts(directory, training.rows.prompts())
        training.vocabulary.save(training.vocabulary_path)  # last: the run has started
    parts.world.barrier()
    if checkpoint is None:
        return State(), window
    _check_same_run(training, checkpoint)
    state = State.of(checkpoint)
    saving.restore(training, checkpoint, window)
    if parts.world.is_main:
        # Prune nothing while a damaged checkpoint takes one of the `keep` places.
        keep = None if complaints else training.recipe.checkpoint.keep
        checkpoints.finish_save(directory, state.best_step, keep=keep)
    observer.note(f"resuming at step {state.step} of {training.stream.steps}")
    return state, window


def _check_same_run(training: Training, checkpoint: checkpoints.Checkpoint) -> None:
    for name, value in training.fingerprints.items():
        if checkpoint.state["fingerprints"].get(name) != value:
            what = f"the {name} is not what this run was started with"
            fix = "give the run another run.output_dir"
            raise BadInput(what, where=str(checkpoint.path), fix=fix)
    now = training.stream.packs_per_step
    before = checkpoint.state.get(checkpoints.PACKS, now)
    if now != before:
        what = f"the run takes {before} packs a step, not {now} (training.micro_batch x "
        what += f"training.accumulate x {training.parts.world.data_size} processes)"
        fix = "the factors may change, but their product must stay the same"
        raise BadInput(what, where=str(checkpoint.path), fix=fix)


class Logs:
    """metrics.jsonl, trackers and the observer, on the main rank."""

    def __init__(self, training: Training, observer: Observer, step: int) -> None:
        self._observer, recipe = observer, training.recipe
        self.last_step = step - step % recipe.tracking.every_steps
        self.timed_from = step  # a resumed process timed only part of its first window
        # A run that starts over evaluates step 0 again.
        self.file = metrics.MetricsFile(training.directory / "metrics.jsonl", resume_at=step or -1)
        self._trackers = metrics.open_trackers(
            recipe.tracking.trackers,
            project=recipe.tracking.project,
            run=recipe.run_name,
            directory=training.directory,
        )

    def write(self, values: dict[str, Any]) -> None:
        self.file.write(values)
        self._track(values["step"], values)
        self._observer.logged(values)

    def evaluated(self, values: dict[str, Any]) -> None:
        self.file.write(values)
        named = {f"evaluation/{name}": value for name, value in values["evaluation"].items()}
        self._track(values["step"], named)
        self._observer.evaluated(values)

    def _track(self, step: int, values: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics.flat_numbers(values))

    def close(self) -> None:
        self.file.close()
        for tracker in self._trackers:
            tracker.close()


# --- bad steps ------------------------------------------------------------------------------------


def bad_rows(
    training: Training, batch: StepBatch, result: StepResult
) -> tuple[list[str], NotFinite | None]:
    """The documents of a bad step, and the error about the target's answer if that is the cause:
    then those of the ranks with such an answer, else those of all ranks. All ranks call this."""
    micro = [rows for rows in batch.micro if rows is not None]
    places = tuple(place for rows in micro for pack in rows.places for place in pack)
    broken = _not_finite(training, micro, result)
    shares = training.parts.world.gathered((places, broken))
    blamed = [share for share in shares if share[1] is not None] or shares
    # ranks that share their rows name them once
    return list(dict.fromkeys(place for places, _ in blamed for place in places)), blamed[0][1]


def _not_finite(
    training: Training, micro: Sequence[TokenBatch], result: StepResult
) -> NotFinite | None:
    """The error that describes this rank's non-finite answers, if it has any."""
    for rows, verdict in zip(micro, result.verdicts, strict=True):
        fault = verdict.fault(training.draft.config.aux_layer_ids)
        if fault is not None:
            return refusal(fault, dtype=verdict.dtype, place=place_of(rows, fault))
    return None
