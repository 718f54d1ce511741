"""`fledge train`: from a recipe to a draft, resumable at any moment."""

import time
from pathlib import Path
from typing import Any

from rich.table import Table
from typer import Exit

from fledge.cli.console import err, out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words, show_set_up
from fledge.cli.options import OutcomeAsJson, RecipeWords
from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.core.machine import is_main_rank
from fledge.core.terminal import marked

EXAMPLE = "Example: fledge train recipes/smollm2_cpu.yaml data.train=chats.jsonl training.lr=1e-3"

# Fields that may differ between a run and its continuation: they do not touch the arithmetic. Data
# and target may lie elsewhere: what they hold is checked by fingerprint.
_FREE = (
    "run.", "data.train:", "data.valid:", "target.model:", "tracking.", "checkpoint.",
    "evaluation.every_steps", "data.workers", "training.prefetch", "training.device",
    "target.device", "training.extend", "training.max_bad_steps", "target.urls",
    "target.token_env", "target.ca_file", "target.prefetch", "target.timeout_s", "target.retries",
    "target.wait_s", "target.shared_memory", "training.context",
)  # fmt: skip


def train(arguments: RecipeWords, as_json: OutcomeAsJson = False) -> None:
    """Train a draft. On an existing run: continue it, or say which field of the recipe differs.

    A finished run says so and stays as it is. With training.extend=true and more steps or epochs it
    is lengthened; draft.init_from=RUN starts a new run from it.
    """
    begin = time.perf_counter()
    recipe = recipe_of_words(arguments).settled()
    check_existing(recipe)
    code = run_recipe(recipe, as_json=as_json, begin=begin)
    if code:
        raise Exit(code)


def check_existing(recipe: Any) -> None:
    """Refuse to continue a run with a recipe that is not its own."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe
    from fledge.train.checkpoint import newest_checkpoint
    from fledge.train.lengthening import LENGTH, ways_on
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
    if differing and all(line.startswith(LENGTH) for line in differing):
        if recipe.training.extend:  # `fit` looks how far the run is
            return
        newest, _ = newest_checkpoint(directory)
        if newest is not None and newest.finished:
            what = f"this run finished at step {newest.step} ({'; '.join(differing)})"
            raise BadInput(what, where=str(directory), fix=ways_on(directory))
    if differing:
        what = f"this run was started with another recipe: {'; '.join(differing[:5])}"
        fix = "give it another run.output_dir, or the recipe it was started with"
        raise BadInput(what, where=str(directory), fix=fix)


def run_recipe(recipe: Any, *, as_json: bool = False, begin: float | None = None) -> int:
    """Set up, train, report; the exit code. `begin`: when the command began."""
    begin = time.perf_counter() if begin is None else begin
    from fledge.core.distributed import leave_world
    from fledge.train.fit import finished_before, fit
    from fledge.train.predict import directory_bytes, peak_memory_bytes, predict
    from fledge.train.setup import set_up

    quiet_libraries()
    ended = finished_before(recipe)
    if ended is not None:
        if is_main_rank():
            _report(recipe, ended, None, None, as_json=as_json)
        return 0
    with progress_bar("preparing data", "parts") as update:
        training = set_up(recipe, show_set_up(update))
        is_main = training.parts.world.is_main
        stream, vocabulary = training.stream, training.vocabulary
        update(description="trying out this machine")
        predicted = predict(training, begin)
        watcher = _Watcher(update, quiet=not is_main)
        watcher.note(
            f"{len(stream.rows):,} rows in {stream.steps:,} steps, padding "
            f"{stream.padding_share:.2%}; draft vocabulary {vocabulary.size:,} covers "
            f"{vocabulary.coverage:.2%} of the supervised tokens; predicted: {predicted.line()}"
        )
        update(description="training", total=stream.steps, completed=0, unit="steps")
        training.watch = watcher.doing
        with training.parts.target:  # let go of it on every way out
            outcome = fit(training, watcher)
    seconds = time.perf_counter() - begin
    spent = {"data": training.data_s, **watcher.spent()}
    truth = {
        "seconds": seconds,
        "seconds_by_part": {"start_up": seconds - sum(spent.values()), **spent},
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
        self._figures = ""
        self._doing, self._since = "training", time.perf_counter()
        self._spent = dict.fromkeys(("training", "evaluating", "saving"), 0.0)

    def note(self, text: str) -> None:
        if not self._quiet:
            err.say(text, style="cyan")

    def doing(self, what: str, step: int, far: str) -> None:
        """The bar counts steps; what is said behind it is how far an evaluation is, or the figures
        of the last steps."""
        now = time.perf_counter()
        self._spent[self._doing] += now - self._since
        self._doing, self._since = what, now
        self._update(description=what, completed=step, note=far or self._figures)

    def spent(self) -> dict[str, float]:
        """Seconds by what was done, in the words of a prediction; there is no more to come."""
        self._spent[self._doing] += time.perf_counter() - self._since
        return dict(zip(("steps", "evaluations", "checkpoints"), self._spent.values(), strict=True))

    def logged(self, values: dict[str, Any]) -> None:
        self._figures = (
            f"loss {values['loss']:.3f} length {values['tau']:.2f} "
            f"{values['tokens_per_s']:,.0f} tok/s target {values['target_share']:.0%}"
        )
        self._update(description="training", completed=values["step"], note=self._figures, now=True)

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
                "already_finished": outcome.already,
                "step": state.step,
                "before": state.first,
                "after": state.last,
                "best_length": state.best_length,
                "warnings": list(outcome.warnings),
                "predicted": None if predicted is None else predicted.to_json(),
                "measured": truth,
            }
        )
        return
    if not outcome.finished:
        out.print(f"stopped after step {state.step}; the same command continues the run")
        return
    if outcome.already:
        from fledge.train.lengthening import ways_on

        out.say(f"already finished at step {state.step}; for more, {ways_on(Path(directory))}")
    if state.last:
        from fledge.methods.registry import METHODS

        method = METHODS[recipe.objective.kind]
        drafted = method.strategies[method.own_strategy].drafted
        out.print(acceptance_table(state.first, state.last, drafted))
    if not outcome.already:
        out.print(predicted.table(truth))
    out.say(f"best checkpoint (a loadable draft): {directory}/best")
    for line in outcome.warnings:
        out.say(f"warning: {line}", style="yellow")


def acceptance_table(before: dict[str, Any], after: dict[str, Any], drafted: str) -> Table:
    """Held-out acceptance before and after training, per drafted token."""
    tokens = [f"token {depth + 1}" for depth in range(len(after["joint"]))]
    shown = plain_table("", "length", *tokens, title=f"held-out acceptance, greedy {drafted}")
    shown.columns[0].no_wrap = True
    for name, values in (("before training", before), ("after training", after)):
        rates = [f"{rate:.1%}" for rate in values["joint"]]
        shown.add_row(name, marked("[bold]{:.2f}[/]", values["acceptance_length"]), *rates)
    shown.caption = (
        "length = tokens per round by exact replay, the target's own token counted; "
        "token k: rounds in which it and all before it were accepted"
    )
    return shown
