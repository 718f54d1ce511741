"""`fledge train`: from a recipe to a draft, resumable at any moment."""

import time
from pathlib import Path
from typing import Any

from rich.table import Table
from typer import Exit

from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import OutcomeAsJson, RecipeWords
from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.core.terminal import marked

EXAMPLE = "Example: fledge train recipes/smollm2_cpu.yaml data.train=chats.jsonl training.lr=1e-3"

# Fields that may differ between a run and its continuation: they do not touch the arithmetic. Data
# and target may lie elsewhere: what they hold is checked by fingerprint.
_FREE = (
    "run.", "data.train:", "data.valid:", "target.model:", "tracking.", "checkpoint.",
    "evaluation.every_steps", "data.workers", "training.prefetch", "training.device",
    "target.device", "training.max_bad_steps", "target.urls", "target.token_env", "target.ca_file",
    "target.prefetch", "target.timeout_s", "target.retries", "target.wait_s",
    "target.shared_memory",
)  # fmt: skip


def train(arguments: RecipeWords, as_json: OutcomeAsJson = False) -> None:
    """Train a draft. On an existing run: continue it, or say which field of the recipe differs."""
    recipe = recipe_of_words(arguments).settled()
    check_existing(recipe)
    code = run_recipe(recipe, as_json=as_json)
    if code:
        raise Exit(code)


def check_existing(recipe: Any) -> None:
    """Refuse to continue a run with a recipe that is not its own."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe
    from fledge.train.runs import as_begun

    directory = Path(recipe.run.output_dir)
    check_place(directory, directory=True)
    resolved = directory / RESOLVED_NAME
    if not resolved.exists():
        # hidden: what a command that was killed at its very beginning left
        if directory.is_dir() and any(not p.name.startswith(".") for p in directory.iterdir()):
            what, fix = "not empty, and not a run of fledge", "run.output_dir=..."
            raise BadInput(what, where=str(directory), fix=fix)
        return
    if not recipe.checkpoint.resume:
        what = "a run is here already, and checkpoint.resume is false"
        raise BadInput(what, where=str(directory), fix="give another run.output_dir")
    differing = load_recipe(resolved).differences(as_begun(recipe))
    differing = [line for line in differing if not line.startswith(_FREE)]
    if differing:
        what = f"this run was started with another recipe: {'; '.join(differing[:5])}"
        fix = "give it another run.output_dir, or the recipe it was started with"
        raise BadInput(what, where=str(directory), fix=fix)


def run_recipe(recipe: Any, *, as_json: bool = False) -> int:
    """Set up, train, report; the exit code."""
    from fledge.core.distributed import leave_world
    from fledge.train.fit import fit
    from fledge.train.predict import directory_bytes, peak_memory_bytes, predict
    from fledge.train.setup import set_up

    quiet_libraries()
    begin = time.perf_counter()
    with progress_bar("preparing data") as update:
        training = set_up(
            recipe, lambda at: update(total=at.parts, completed=at.done, note="parts")
        )
        is_main = training.parts.world.is_main
        stream, vocabulary = training.stream, training.vocabulary
        predicted = predict(training)
        watcher = _Watcher(update, quiet=not is_main)
        watcher.note(
            f"{len(stream.rows):,} rows in {stream.steps:,} steps, padding "
            f"{stream.padding_share:.2%}; draft vocabulary {vocabulary.size:,} covers "
            f"{vocabulary.coverage:.2%} of the supervised tokens; predicted: {predicted.line()}"
        )
        update(description="training", total=stream.steps, completed=0)
        with training.parts.target:  # let go of it on every way out
            outcome = fit(training, watcher)
    seconds = time.perf_counter() - begin
    truth = {
        "seconds": seconds,
        "peak_bytes": peak_memory_bytes(training.parts.device),
        "disk_bytes": directory_bytes(training.directory),
    }
    if is_main:
        _report(recipe, outcome, predicted, truth, as_json=as_json)
    leave_world(training.parts.world)
    return 0 if outcome.finished else 128 + outcome.signal


class _Watcher:
    """Shows a run while it goes on."""

    def __init__(self, update: Any, *, quiet: bool) -> None:
        self._update, self._quiet = update, quiet

    def note(self, text: str) -> None:
        if not self._quiet:
            err.say(text, style="cyan")

    def logged(self, values: dict[str, Any]) -> None:
        note = (
            f"loss {values['loss']:.3f} tau {values['tau']:.2f} "
            f"{values['tokens_per_s']:,.0f} tok/s target {values['target_share']:.0%}"
        )
        self._update(completed=values["step"], note=note)

    def evaluated(self, values: dict[str, Any]) -> None:
        evaluation = values["evaluation"]
        rates = " ".join(f"{rate:.3f}" for rate in evaluation["joint"])
        length = evaluation["acceptance_length"]
        err.say(f"step {values['step']:>6}  held-out acceptance length {length:.3f}  ({rates})")


def _report(recipe: Any, outcome: Any, predicted: Any, truth: Any, *, as_json: bool) -> None:
    state, directory = outcome.state, recipe.run.output_dir
    if as_json:
        print_json(
            {
                "directory": directory,
                "finished": outcome.finished,
                "step": state.step,
                "before": state.first,
                "after": state.last,
                "best_length": state.best_length,
                "warnings": list(outcome.warnings),
                "predicted": predicted.to_json(),
                "measured": truth,
            }
        )
        return
    if not outcome.finished:
        out.print(f"stopped after step {state.step}; the same command continues the run")
        return
    if state.last:
        from fledge.methods.registry import METHODS

        method = METHODS[recipe.objective.kind]
        drafted = method.strategies[method.own_strategy].drafted
        out.print(acceptance_table(state.first, state.last, drafted))
    out.print(predicted.table(truth))
    out.say(f"best checkpoint (a loadable draft): {directory}/best")
    for line in outcome.warnings:
        out.say(f"warning: {line}", style="yellow")


def acceptance_table(before: dict[str, Any], after: dict[str, Any], drafted: str) -> Table:
    """Held-out acceptance before and after training, per drafted token."""
    tokens = ["token 1", *(f"{k}" for k in range(2, len(after["joint"]) + 1))]
    title = f"held-out acceptance before and after training, greedy {drafted}"
    shown = plain_table("", "length", *tokens, title=title, no_wrap=True)
    for name, values in (("before", before), ("after", after)):
        rates = [f"{rate:.1%}" for rate in values["joint"]]
        shown.add_row(name, marked("[bold]{:.2f}[/]", values["acceptance_length"]), *rates)
    shown.caption = (
        "length = tokens per round by exact replay, the target's own token counted; "
        "token k: rounds in which it and all before it were accepted"
    )
    return shown
