"""`fledge train`: train a draft from a recipe, resumable at any point."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from typer import Exit

from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import OutcomeAsJson, RecipeWords
from fledge.core.machine import is_main_rank
from fledge.core.progress import Progress
from fledge.core.terminal import counted, marked
from fledge.training.continuation import check_existing as check_existing
from fledge.training.continuation import way_on

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe
    from fledge.training.session import Outcome

EXAMPLE = "Example: fledge train smollm2_cpu data.train=chats.jsonl training.lr=1e-3"


def train(arguments: RecipeWords, as_json: OutcomeAsJson = False) -> None:
    """Train a draft. On an existing run: continue it, or say which field of the recipe differs.

    A finished run is reported as such and left as it is; draft.init_from=RUN starts a new run from
    it.
    """
    begin = time.perf_counter()
    recipe = recipe_of_words(arguments).settled()
    check_existing(recipe)
    code = run_recipe(recipe, as_json=as_json, begin=begin)
    if code:
        raise Exit(code)


def run_recipe(recipe: "Recipe", *, as_json: bool = False, begin: float | None = None) -> int:
    """Set up, train and report; returns the exit code. `begin`: when the command started."""
    begin = time.perf_counter() if begin is None else begin
    from fledge.core.distributed import leave_world
    from fledge.training.fit import finished_before, fit
    from fledge.training.planning.prediction import directory_bytes, peak_memory_bytes, predict
    from fledge.training.setup import set_up

    quiet_libraries()
    report = _report_json if as_json else _report
    if (earlier := finished_before(recipe)) is not None:
        if is_main_rank():
            report(recipe, earlier, None, None)
        return 0
    with progress_bar("preparing data") as progress:
        training = set_up(recipe, progress)
        with training.parts.target:  # closed on every exit path
            stream, world = training.stream, training.parts.world
            progress("trying out this machine")
            predicted = predict(training, begin)
            watcher = _Watcher(progress, stream.steps)
            watcher.note(
                f"{counted(len(stream.rows), 'row')} in {counted(stream.steps, 'step')}, padding "
                f"{stream.padding_share:.2%}; draft vocabulary {training.vocabulary.size:,} covers "
                f"{training.vocabulary.coverage:.2%} of the supervised tokens; "
                f"predicted: {predicted.line()}"
            )
            training.watch = watcher.doing
            outcome = fit(training, watcher)
    measured = {
        "seconds": time.perf_counter() - begin,
        "peak_bytes": peak_memory_bytes(training.parts.device),
        "disk_bytes": directory_bytes(training.directory),
    }
    if world.is_main:
        report(recipe, outcome, predicted, measured)
    leave_world(world)
    return 0 if outcome.finished else 128 + outcome.signal


class _Watcher:
    """Shows the progress of a run on a bar that counts steps; it is the run's observer, too."""

    def __init__(self, progress: Progress, steps: int) -> None:
        self._show, self._step, self._steps, self.note = progress, 0.0, steps, progress.say
        self._figures = ""  # of the last steps

    def doing(self, what: str, done: float, total: float) -> None:
        note = f"{done:.0f} of {total} packs" if what == "evaluating" else self._figures
        self._step = self._step if what == "evaluating" else done
        self._show(what, self._step, self._steps, "steps", note)

    def logged(self, values: dict[str, Any]) -> None:
        self._figures = (
            f"loss {values['loss']:.3f} length {values['tau']:.2f} "
            f"{values['tokens_per_s']:,.0f} tok/s target {values['target_share']:.0%}"
        )
        self._step = values["step"]
        self._show("training", self._step, self._steps, "steps", self._figures, now=True)

    def evaluated(self, values: dict[str, Any]) -> None:
        evaluation = values["evaluation"]
        rates = " ".join(f"{rate:.3f}" for rate in evaluation["joint"])
        step, length = f"step {values['step']:>6}", evaluation["acceptance_length"]
        err.say(f"{step}  held-out acceptance length {length:.3f}  ({rates})")


def _report_json(recipe: "Recipe", outcome: "Outcome", predicted: Any, measured: Any) -> None:
    state = outcome.state
    print_json(
        {
            "directory": recipe.run.output_dir,
            "finished": outcome.finished,
            "already_finished": outcome.already,
            "step": state.step,
            "before": state.first,
            "after": state.last,
            "best_length": state.best_length,
            "warnings": list(outcome.warnings),
            "predicted": None if predicted is None else predicted.to_json(),
            "measured": measured,
        }
    )


def _report(recipe: "Recipe", outcome: "Outcome", predicted: Any, measured: Any) -> None:
    """Report how a run ended, and what it cost."""
    state, directory = outcome.state, recipe.run.output_dir
    if not outcome.finished:
        out.print(f"stopped after step {state.step}; the same command continues the run")
        return
    if outcome.already:
        out.say(f"already finished at step {state.step}; for more, {way_on(Path(directory))}")
    if state.last:
        from fledge.methods.registry import METHODS

        method = METHODS[recipe.objective.kind]
        drafted = method.strategies[method.own_strategy].drafted
        out.print(acceptance_table(state.first, state.last, drafted))
    if not outcome.already:
        out.print(predicted.table(measured))
    out.say(f"best checkpoint (a loadable draft): {directory}/best")
    for line in outcome.warnings:
        out.say(f"warning: {line}", style="yellow")


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
