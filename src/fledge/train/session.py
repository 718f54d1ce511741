"""A run while it is trained: its draft's state, and what happens around a step of it.

`fit.py` is the loop. Here is what each draft does on its own, however many are trained in one pass:
resume, read a step's verdict, log, remember an evaluation, save.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fledge.core.errors import BadInput
from fledge.core.files import write_json
from fledge.core.machine import MACHINE_NAME, describe_machine
from fledge.core.rows import TokenBatch
from fledge.core.text import counted
from fledge.models.convert_gguf import DTYPE_VARIABLE
from fledge.recipe.schema import Recipe
from fledge.target.finite import NotFinite, module_of, place_of, refusal
from fledge.target.kinds import model_name
from fledge.train import checkpoint as checkpoints
from fledge.train import lengthening, metrics, saving
from fledge.train.batches import StepBatch
from fledge.train.evaluate import learnt_nothing
from fledge.train.forecast.curves import curve_of, read_metrics
from fledge.train.forecast.forecast import forecast
from fledge.train.forecast.guides import Known
from fledge.train.forecast.known_runs import known_runs
from fledge.train.setup import Training
from fledge.train.step import StepResult, Sums


class Observer(Protocol):
    """An observer of a run: the command line, a test, a notebook."""

    def note(self, text: str) -> None: ...
    def logged(self, values: dict[str, Any]) -> None: ...
    def evaluated(self, values: dict[str, Any]) -> None: ...


@dataclass
class State:
    """Everything that changes during a run, besides weights and moments."""

    step: int = 0
    seconds: float = 0.0  # spent in training, over all resumptions
    best_length: float = 0.0  # held-out acceptance length, by replay
    best_step: int = 0  # where it was measured; 0: nowhere yet
    first: dict[str, Any] = field(default_factory=dict)  # held-out acceptance before training
    last: dict[str, Any] = field(default_factory=dict)  # and the latest
    schedule_from: int = 0  # where the schedule began: 0, or where a finished run was lengthened

    @classmethod
    def of(cls, checkpoint: checkpoints.Checkpoint) -> "State":
        held = checkpoint.state
        return cls(**{name: held[name] for name in vars(cls()) if name in held})


@dataclass(frozen=True)
class Outcome:
    state: State
    finished: bool
    signal: int = 0  # the signal that ended it early
    already: bool = False  # it was finished before, and nothing was trained
    warnings: tuple[str, ...] = ()  # a run that is over, and hardly what was meant


class Session:
    """One draft's run, from where it stands."""

    def __init__(self, training: Training, observer: Observer) -> None:
        self.training, self.parts, self.observer = training, training.parts, observer
        for line in training.warnings:
            observer.note(f"warning: {line}")
        with self.parts.turn():
            self.state, self._window = resume(training, observer)
        self._begun = self._saved = self.state.step
        self._pending: tuple[StepBatch, StepResult] | None = None
        main = self.parts.world.is_main
        self._logs = Logs(training, observer, self.state) if main else None

    @property
    def step(self) -> int:
        """How many steps are done."""
        return self.state.step

    @property
    def _last(self) -> bool:
        return self.state.step == self.training.stream.steps

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.training.lr(self.state.step, schedule_from=self.state.schedule_from)

    def stepped(self, batch: StepBatch, result: StepResult, lr: float) -> bool:
        """Count a step, and read the verdict on the one before: no waiting. True: all ranks know
        that a stop was asked for."""
        self.state.step += 1
        self._window += result.sums
        stopping = self.read()
        self._pending = (batch, result)
        if self._last or self.state.step % self.training.recipe.tracking.every_steps == 0:
            self._log(result, lr, batch.epoch)
            self._window = Sums.zeros(self.parts.objective.depths, self.parts.device)
        return stopping

    def read(self) -> bool:
        """Look at a finished step: was it skipped, have we had enough, was a stop asked for?"""
        if self._pending is None:
            return False
        batch, result = self._pending
        bad, stop = result.flags.read().tolist()
        if bad:
            self._skipped(batch, result)
        return bool(stop)

    def _skipped(self, batch: StepBatch, result: StepResult) -> None:
        training = self.training
        micro = [rows for rows in batch.micro if rows is not None]
        places = [place for rows in micro for pack in rows.places for place in pack]
        norm, shown = float(result.grad_norm), ", ".join(places[:3])
        broken = _not_finite(training, micro, result)
        self.observer.note(
            f"step {batch.step + 1} skipped: gradient norm {norm:.3g}; its "
            f"{counted(len(places), 'document begins', 'documents begin')} with {shown}"
            + ("" if broken is None else f"; {broken.what}")
        )
        limit = training.recipe.training.max_bad_steps
        if int(result.bad_in_a_row) >= limit:
            where, what = str(training.directory), f"{limit} steps in a row were skipped"
            if broken is not None:  # not the draft's doing, nor the learning rate's
                raise NotFinite(f"{what}: {broken.what}", where=where, fix=broken.fix)
            what += f" (last gradient norm {norm:.3g}, documents {shown})"
            fix = "lower training.lr or look at these rows; the last checkpoint is intact"
            raise BadInput(what, where=where, fix=fix)

    def _log(self, result: StepResult, lr: float, epoch: int) -> None:
        """One line of metrics about the steps since the last one."""
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
        due = self._last or self.state.step % every == 0
        return due and bool(self.training.held_out)

    @property
    def evaluation_missed(self) -> bool:
        """The one before the first step, or one that a vanished target cut off."""
        return self.evaluation_due and self.state.last.get("step") != self.state.step

    def evaluated(self, evaluation: dict[str, Any]) -> bool:
        """Remember held-out acceptance; True when it is the best so far."""
        state = self.state
        self.parts.clock.read()  # not part of the training speed
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
        """Also when a step made the best draft so far, was the last, or was asked to be."""
        if self._last and self._logs is not None:
            self._logs.warned(self.state.step, in_vain(self.training.recipe, self.state))
        cadence = self.training.recipe.checkpoint.every_steps
        if best or self._last or stopping or self.state.step % cadence == 0:
            self.save(best=best)

    def save(self, *, best: bool = False) -> None:
        training, state, world = self.training, self.state, self.parts.world
        training.watch("saving", state.step, "")
        with self.parts.turn():
            path = saving.save(training, vars(state), self._window)
        if world.is_main:
            if best:
                checkpoints.mark_best(training.directory, path)
            checkpoints.prune(training.directory, training.recipe.checkpoint.keep)
            lengthening.write_down(training.recipe, training.directory)
        world.barrier()
        self._saved = state.step

    def stop_here(self) -> None:
        """Between two steps, where the target is gone: nothing is half done."""
        if self.state.step > self._saved:
            self.save()
        at = f"stopped after step {self.state.step}"
        self.observer.note(f"{at}; the same command continues the run")

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()

    def outcome(self, signal: int) -> Outcome:
        training, state, finished = self.training, self.state, self._last
        assert self._saved == state.step or finished
        vain = in_vain(training.recipe, state) if finished else ()
        already = self._begun == training.stream.steps
        return Outcome(state, finished, signal, already, warnings=(*training.warnings, *vain))


def in_vain(recipe: Recipe, state: State) -> list[str]:
    """The warning about a finished run that came to nothing, if it did."""
    if not state.last.get("rounds"):
        return []
    lengths = state.first.get("acceptance_length"), state.best_length
    return learnt_nothing(*lengths, lr=recipe.training.lr)


def _not_finite(
    training: Training, micro: Sequence[TokenBatch], result: StepResult
) -> NotFinite | None:
    """What is wrong with the target's answers of a bad step; None: it is not their fault, or they
    are another rank's."""
    target, config = training.parts.target, training.draft.config
    for rows, verdict in zip(micro, result.verdicts, strict=True):
        fault = verdict.fault(config.aux_layer_ids)
        if fault is not None:
            place, model = place_of(rows, fault), module_of(target)
            return refusal(fault, dtype=verdict.dtype, place=place, model=model)
    return None


def resume(training: Training, observer: Observer) -> tuple[State, Sums]:
    """Continue from the newest whole checkpoint, or start: write recipe and vocabulary."""
    parts, directory = training.parts, training.directory
    window = Sums.zeros(parts.objective.depths, parts.device)
    checkpoint, complaints = saving.newest(training)
    for complaint in complaints:
        observer.note(f"passing over a checkpoint: {complaint}")
    if parts.world.is_main and not training.vocabulary_path.exists():
        training.recipe.write_resolved(directory)
        write_json(directory / MACHINE_NAME, describe_machine())
        training.vocabulary.save(training.vocabulary_path)
    parts.world.barrier()
    if checkpoint is None:
        return State(), window
    _check_same_run(training, checkpoint)
    state = State.of(checkpoint)
    if lengthening.begins(training, checkpoint):
        state.schedule_from = state.step
    saving.restore(training, checkpoint, window)
    if parts.world.is_main:
        # a damaged checkpoint counts for nothing: then all others stay
        keep = None if complaints else training.recipe.checkpoint.keep
        checkpoints.finish_save(directory, state.best_step, keep=keep)
    observer.note(f"resuming at step {state.step} of {training.stream.steps}")
    return state, window


def _check_same_run(training: Training, checkpoint: checkpoints.Checkpoint) -> None:
    for name, value in training.fingerprints.items():
        if checkpoint.state["fingerprints"].get(name) != value:
            what = f"the {name} is not what this run was started with"
            fix = "give the run another run.output_dir"
            if name == "target" and model_name(training.recipe.target).lower().endswith(".gguf"):
                fix = f"{DTYPE_VARIABLE}=float32 reads it as earlier versions did; or {fix}"
            raise BadInput(what, where=str(checkpoint.path), fix=fix)
    now = training.stream.packs_per_step
    before = checkpoint.state.get(checkpoints.PACKS, now)  # older ones do not say
    if now != before:
        what = f"the run takes {before} packs a step, not {now} (training.micro_batch x "
        what += f"training.accumulate x {training.parts.world.data_size} processes)"
        fix = "the product may be made in another way, but must stay the same"
        raise BadInput(what, where=str(checkpoint.path), fix=fix)


class Logs:
    """metrics.jsonl, trackers and the observer, on the main rank."""

    def __init__(self, training: Training, observer: Observer, state: State) -> None:
        self._training, self._state, recipe = training, state, training.recipe
        self._known: list[Known] | None = None  # finished runs; not looked for yet
        begun = state.step - state.step % recipe.tracking.every_steps
        self.last_step = max(begun, state.schedule_from)  # a run's last step ends a window, too
        self.timed_from = state.step  # a resumed run has not seen the whole window
        self._observer = observer
        resume_at = state.step or -1  # a run that starts over measures step 0 again
        self._file = metrics.MetricsFile(training.directory / "metrics.jsonl", resume_at=resume_at)
        self._trackers: list[metrics.Tracker] = metrics.open_trackers(
            recipe.tracking.trackers,
            project=recipe.tracking.project,
            run=recipe.run_name,
            directory=training.directory,
        )

    def write(self, values: dict[str, Any]) -> None:
        self._file.write(values)
        self._track(values["step"], values)
        self._observer.logged(values)

    def evaluated(self, values: dict[str, Any]) -> None:
        self._file.write(values)
        self._track(
            values["step"], {f"evaluation/{name}": v for name, v in values["evaluation"].items()}
        )
        self._observer.evaluated({**values, "forecast": self._ahead()})

    def _ahead(self) -> str | None:
        """A line about the rest of the run, once its curve tells."""
        recipe, directory = self._training.recipe, self._training.directory
        steps = self._training.stream.steps
        try:
            lines = read_metrics(directory)
            if self._known is None:
                self._known = known_runs(directory)
            curve = curve_of(recipe, steps, *lines, begun_at=self._state.schedule_from)
            return forecast(curve, known=self._known).line()
        except BadInput:  # too early
            return None

    def warned(self, step: int, warnings: Sequence[str]) -> None:
        for text in warnings:
            self._file.write({"step": step, "warning": text})

    def _track(self, step: int, values: dict[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics.flat_numbers(values))

    def close(self) -> None:
        self._file.close()
        for tracker in self._trackers:
            tracker.close()
