"""`fledge train`: train a draft from a recipe, resumable at any point."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from typer import Exit

from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipes_of_words
from fledge.cli.options import OutcomeAsJson, RecipeWords
from fledge.core.machine import is_main_rank
from fledge.core.progress import Progress
from fledge.core.terminal import counted, marked
from fledge.training.continuation import check_existing as check_existing

EXAMPLE = "Example: fledge train smollm2_cpu data.train=chats.jsonl training.lr=1e-3"


def train(arguments: RecipeWords, as_json: OutcomeAsJson = False) -> None:
    """Train a draft. On an existing run: continue it, or say which field of the recipe differs.

    A finished run is reported as such and left as it is. With training.extend=true and more steps
    or epochs it is lengthened; draft.init_from=RUN starts a new run from it.

    A recipe may name several drafts. The target then answers once for all of them, and each is a
    run of its own below run.output_dir.
    """
    begin = time.perf_counter()
    recipes = {name: recipe.settled() for name, recipe in recipes_of_words(arguments).items()}
    for name, recipe in recipes.items():
        check_existing(recipe, one_of_several=bool(name))
    code = run_recipes(recipes, as_json=as_json, begin=begin)
    if code:
        raise Exit(code)


def run_recipe(recipe: Any, *, as_json: bool = False, begin: float | None = None) -> int:
    """Set up, train and report; returns the exit code. `begin`: when the command started."""
    return run_recipes({"": recipe}, as_json=as_json, begin=begin)


def run_recipes(
    recipes: Mapping[str, Any], *, as_json: bool = False, begin: float | None = None
) -> int:
    """`run_recipe` for several drafts by name, which share one pass of the target."""
    begin = time.perf_counter() if begin is None else begin
    from fledge.core.distributed import leave_world
    from fledge.core.heartbeat import ending_together
    from fledge.training.fit import finished_before, fit_together, target_of
    from fledge.training.planning.prediction import (
        directory_bytes,
        peak_memory_bytes,
        predict_together,
    )
    from fledge.training.setup import set_up_together
    from fledge.training.signals import StopSignal

    quiet_libraries()
    earlier = {name: finished_before(recipe) for name, recipe in recipes.items()}
    if all(outcome is not None for outcome in earlier.values()):
        if is_main_rank():
            _report(recipes, earlier, None, None, as_json=as_json)
        return 0
    with ending_together(StopSignal), progress_bar("preparing data") as progress:
        trainings = set_up_together([*recipes.values()], progress, watched=True)
        first, world = trainings[0], trainings[0].parts.world
        progress("trying out this machine")
        predicted = predict_together(trainings, begin)
        watcher = _Watcher(progress)
        progress.say(f"{_setup_line(recipes, trainings)}; predicted: {predicted.line()}")
        for training in trainings:
            training.progress = watcher
        with target_of(trainings):  # closed on every exit path
            results = fit_together(trainings, [_Observer(watcher, name) for name in recipes])
    outcomes = dict(zip(recipes, results, strict=True))
    seconds = time.perf_counter() - begin
    seconds_by_part = {"data": first.data_s, **watcher.spent()}
    measured = {
        "seconds": seconds,
        "seconds_by_part": {"start_up": seconds - sum(seconds_by_part.values()), **seconds_by_part},
        "peak_bytes": peak_memory_bytes(first.parts.device),
        "disk_bytes": sum(directory_bytes(training.directory) for training in trainings),
    }
    if world.is_main:
        _report(recipes, outcomes, predicted, measured, as_json=as_json)
    leave_world(world)
    return 0 if all(outcome.finished for outcome in results) else 128 + results[0].signal


def _setup_line(recipes: Mapping[str, Any], trainings: Sequence[Any]) -> str:
    """One line about what is going to be trained."""
    stream = trainings[0].stream
    coverage = [
        f"draft vocabulary {_prefix(name)}{training.vocabulary.size:,} covers "
        f"{training.vocabulary.coverage:.2%} of the supervised tokens"
        for name, training in zip(recipes, trainings, strict=True)
    ]
    rows = f"{counted(len(stream.rows), 'row')} in {counted(stream.steps, 'step')}"
    return f"{rows}, padding {stream.padding_share:.2%}; {'; '.join(coverage)}"


def _prefix(name: str) -> str:
    """The prefix of a line about a draft; a single draft has no name and no prefix."""
    return f"{name}: " if name else ""


class _Watcher(Progress):
    """Shows the progress of all drafts in one bar."""

    def __init__(self, shown: Progress) -> None:
        self._show, self._steps = shown, 0.0
        self._figures: dict[str, tuple[int, str]] = {}  # by draft: (step, text)
        self._speed = ""
        self._doing, self._since = "training", time.perf_counter()
        self._spent = dict.fromkeys(("training", "evaluating", "saving"), 0.0)

    def say(self, text: str) -> None:
        self._show.say(text)

    def __call__(
        self, what: str, done: float = 0, total: float = 0, unit: str = "", note: str = "", *,
        now: bool = False,
    ) -> None:  # fmt: skip
        """Update the bar, which counts steps; the note behind it is that of an evaluation, or else
        the figures of the last steps."""
        time_s = time.perf_counter()
        self._spent[self._doing] += time_s - self._since
        self._doing, self._since, self._steps = what, time_s, total
        self._show(what, done, total, unit, note or self._shown(), now=now)

    def spent(self) -> dict[str, float]:
        """Seconds by activity, under the names that a prediction uses; called once, at the end."""
        self._spent[self._doing] += time.perf_counter() - self._since
        return dict(zip(("steps", "evaluations", "checkpoints"), self._spent.values(), strict=True))

    def figures(self, name: str, values: dict[str, Any]) -> None:
        """Record the last steps of one draft; shown once all drafts have reached that step."""
        step = values["step"]
        text = f"{_prefix(name)}loss {values['loss']:.3f} length {values['tau']:.2f}"
        self._figures[name] = step, text
        self._speed = f"{values['tokens_per_s']:,.0f} tok/s target {values['target_share']:.0%}"
        if all(at == step for at, _ in self._figures.values()):
            self._show("training", step, self._steps, "steps", self._shown(), now=True)

    def _shown(self) -> str:
        figures = ", ".join(shown for _, shown in self._figures.values())
        return f"{figures} {self._speed}".strip()


class _Observer:
    """Shows the progress of one draft's run."""

    def __init__(self, watcher: _Watcher, name: str) -> None:
        self._watcher, self._name = watcher, name

    def note(self, text: str) -> None:
        self._watcher.say(f"{_prefix(self._name)}{text}")

    def logged(self, values: dict[str, Any]) -> None:
        self._watcher.figures(self._name, values)

    def evaluated(self, values: dict[str, Any]) -> None:
        evaluation = values["evaluation"]
        rates = " ".join(f"{rate:.3f}" for rate in evaluation["joint"])
        step, length = f"step {values['step']:>6}", evaluation["acceptance_length"]
        err.say(f"{_prefix(self._name)}{step}  held-out acceptance length {length:.3f}  ({rates})")
        if values.get("forecast"):
            err.say(f"{_prefix(self._name)}{values['forecast']}", style="cyan")


def _report(
    recipes: Mapping[str, Any],
    outcomes: Mapping[str, Any],
    predicted: Any,
    measured: Any,
    *,
    as_json: bool,
) -> None:
    """Report how the runs of all drafts ended, and what they cost together."""
    if as_json:
        by_name = {name: _outcome_json(recipe, outcomes[name]) for name, recipe in recipes.items()}
        cost = {
            "predicted": None if predicted is None else predicted.to_json(),
            "measured": measured,
        }
        print_json({**by_name.get("", {"drafts": by_name}), **cost})
        return
    for name, recipe in recipes.items():
        if name:
            out.rule(marked("[bold]{}", name))
        _report_draft(recipe, outcomes[name])
    results = outcomes.values()
    if all(run.finished for run in results) and not all(run.already for run in results):
        out.print(predicted.table(measured))
    for name, outcome in outcomes.items():
        if outcome.finished:
            directory = recipes[name].run.output_dir
            out.say(f"{_prefix(name)}best checkpoint (a loadable draft): {directory}/best")
            for line in outcome.warnings:
                out.say(f"{_prefix(name)}warning: {line}", style="yellow")


def _outcome_json(recipe: Any, outcome: Any) -> dict[str, Any]:
    state = outcome.state
    return {
        "directory": recipe.run.output_dir,
        "finished": outcome.finished,
        "already_finished": outcome.already,
        "step": state.step,
        "before": state.first,
        "after": state.last,
        "best_length": state.best_length,
        "warnings": list(outcome.warnings),
    }


def _report_draft(recipe: Any, outcome: Any) -> None:
    state, directory = outcome.state, recipe.run.output_dir
    if not outcome.finished:
        out.print(f"stopped after step {state.step}; the same command continues the run")
        return
    if outcome.already:
        from fledge.training.continuation import ways_on

        out.say(f"already finished at step {state.step}; for more, {ways_on(Path(directory))}")
    if state.last:
        from fledge.methods.registry import METHODS

        method = METHODS[recipe.objective.kind]
        drafted = method.strategies[method.own_strategy].drafted
        out.print(acceptance_table(state.first, state.last, drafted))


def acceptance_table(before: dict[str, Any], after: dict[str, Any], drafted: str) -> Table:
    """Held-out acceptance before and after training, per drafted token."""
    tokens = ["token 1", *(f"{k}" for k in range(2, len(after["joint"]) + 1))]
    title = f"held-out acceptance before and after training, greedy {drafted}"
    table = plain_table("", "length", *tokens, title=title, no_wrap=True)
    for name, values in (("before", before), ("after", after)):
        rates = [f"{rate:.1%}" for rate in values["joint"]]
        table.add_row(name, marked("[bold]{:.2f}[/]", values["acceptance_length"]), *rates)
    table.caption = (
        "length: tokens per round by exact replay, the target's own token counted\n"
        "token k: rounds in which it and all before it were accepted"
    )
    return table
