"""The training loop: resume, step, log / evaluate / save on cadence, close. See also `step.py`."""

import contextlib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fledge.core.errors import BadInput, TargetUnreachable
from fledge.core.files import alone_in, write_json
from fledge.core.machine import MACHINE_NAME, describe_machine, is_main_rank
from fledge.core.rows import TokenBatch
from fledge.core.text import counted
from fledge.models.convert_gguf import DTYPE_VARIABLE
from fledge.recipe.schema import Recipe
from fledge.target.finite import NotFinite, module_of, place_of, refusal
from fledge.target.kinds import model_name
from fledge.train import checkpoint as checkpoints
from fledge.train import lengthening, metrics, saving
from fledge.train.ahead import ask_ahead
from fledge.train.evaluate import evaluate, learnt_nothing
from fledge.train.setup import Training
from fledge.train.signals import StopSignal
from fledge.train.step import StepResult, Sums, train_step


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


def fit(training: Training, observer: Observer) -> Outcome:
    """Train from wherever the run stands to its end, or to the next signal."""
    main = training.parts.world.is_main
    with alone_in(training.directory) if main else contextlib.nullcontext():
        return _fit(training, observer)


def _fit(training: Training, observer: Observer) -> Outcome:
    recipe, parts = training.recipe, training.parts
    for line in training.warnings:
        observer.note(f"warning: {line}")
    state, window = resume(training, observer)
    begun = state.step
    logs = _Logs(training, observer, state) if parts.world.is_main else None
    total = training.stream.steps
    pending: tuple[Any, StepResult] | None = None
    saved = state.step
    prefetched = training.stream.prefetched(state.step, recipe.training.prefetch)
    with StopSignal() as stop, closing(prefetched) as batches:
        try:
            _evaluate_if_missed(training, state, window, logs)
            parts.objective.draft_model.train()
            parts.clock.read()
            for batch in ask_ahead(parts, batches, stopping=lambda: bool(stop.received)):
                training.watch("training", state.step, "")
                lr = training.lr(state.step, schedule_from=state.schedule_from)
                result = train_step(parts, batch, lr=lr, stopping=bool(stop.received))
                state.step += 1
                window += result.sums
                stopping = _read(training, pending, observer)  # the step before: no waiting
                pending = (batch, result)
                last = state.step == total
                if last or state.step % recipe.tracking.every_steps == 0:
                    _log(training, state, window, result, lr, batch.epoch, logs)
                    window = Sums.zeros(parts.objective.depths, parts.device)
                improved = _evaluation_due(training, state) and _evaluate(training, state, logs)
                if last and logs is not None:
                    logs.warned(state.step, in_vain(recipe, state))
                if improved or last or stopping or state.step % recipe.checkpoint.every_steps == 0:
                    _save(training, state, window, best=improved)
                    saved = state.step
                if stopping:
                    break
            _read(training, pending, observer)
        except TargetUnreachable:  # between two steps: nothing is half done
            if state.step > saved:
                _save(training, state, window, best=False)
            saved = state.step
            observer.note(f"stopped after step {state.step}; the same command continues the run")
            if not stop.received:
                raise
        finally:
            if logs is not None:
                logs.close()
    assert saved == state.step or state.step == total
    finished = state.step == total
    warnings = (*training.warnings, *(in_vain(recipe, state) if finished else ()))
    return Outcome(state, finished, stop.received, already=begun == total, warnings=warnings)


def finished_before(recipe: Recipe) -> Outcome | None:
    """How the run in a recipe's place ended, if it did and is not to be lengthened: known without
    its data and its target. None: `fit` has to look."""
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


def in_vain(recipe: Recipe, state: State) -> list[str]:
    """The warning about a finished run that came to nothing, if it did."""
    if not state.last.get("rounds"):
        return []
    lengths = state.first.get("acceptance_length"), state.best_length
    return learnt_nothing(*lengths, lr=recipe.training.lr)


def _evaluation_due(training: Training, state: State) -> bool:
    every = training.recipe.evaluation.every_steps
    return state.step == training.stream.steps or state.step % every == 0


def _evaluate_if_missed(
    training: Training, state: State, window: Sums, logs: "_Logs | None"
) -> None:
    """The measurement before the first step, and one that a vanished target cut off."""
    if not _evaluation_due(training, state) or state.last.get("step") == state.step:
        return
    improved = _evaluate(training, state, logs)
    if state.step == 0:
        state.first = state.last
    elif improved:
        _save(training, state, window, best=True)


def _read(training: Training, pending: tuple[Any, StepResult] | None, observer: Observer) -> bool:
    """Look at a finished step: was it skipped, have we had enough, was a stop asked for?"""
    if pending is None:
        return False
    batch, result = pending
    if bool(result.bad):
        micro = [rows for rows in batch.micro if rows is not None]
        places = [place for rows in micro for pack in rows.places for place in pack]
        norm, shown = float(result.grad_norm), ", ".join(places[:3])
        broken = _not_finite(training, micro, result)
        observer.note(
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
    return bool(result.stop)


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


def _log(
    training: Training,
    state: State,
    window: Sums,
    result: StepResult,
    lr: float,
    epoch: int,
    logs: "_Logs | None",
) -> None:
    """One line of metrics about the steps since the last one."""
    parts, stream = training.parts, training.stream
    sums = window.over(parts.world)
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


def _evaluate(training: Training, state: State, logs: "_Logs | None") -> bool:
    """Measure held-out acceptance; True when it is the best so far."""
    if not training.held_out:
        return False
    evaluation = evaluate(
        training.parts, training.held_out, training.held_out_picks,
        lambda done, packs: training.watch("evaluating", state.step, f"{done} of {packs} packs"),
    )  # fmt: skip
    training.parts.clock.read()  # not part of the training speed
    state.last = {"step": state.step, **evaluation}
    if logs is not None:
        logs.evaluated({"step": state.step, "evaluation": evaluation})
    if state.step == 0 or evaluation["acceptance_length"] <= state.best_length:
        return False
    state.best_length, state.best_step = evaluation["acceptance_length"], state.step
    return True


def _save(training: Training, state: State, window: Sums, *, best: bool) -> None:
    main = training.parts.world.is_main
    training.watch("saving", state.step, "")
    path = saving.save(training, vars(state), window)
    if main:
        if best:
            checkpoints.mark_best(training.directory, path)
        checkpoints.prune(training.directory, training.recipe.checkpoint.keep)
        lengthening.write_down(training.recipe, training.directory)
    training.parts.world.barrier()


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


class _Logs:
    """metrics.jsonl, trackers and the observer, on the main rank."""

    def __init__(self, training: Training, observer: Observer, state: State) -> None:
        recipe = training.recipe
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
        self._observer.evaluated(values)

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
