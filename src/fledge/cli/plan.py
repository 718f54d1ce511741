"""`fledge plan`: memory, disk and hours of a run, before it runs."""

import time
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fledge.cli.console import out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words, show_set_up
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.text import counted

if TYPE_CHECKING:
    from fledge.train.predict import Prediction

EXAMPLE = (
    "Example: fledge plan smollm2_gpu data.train=chats.jsonl\n\n"
    "Example: fledge plan llama33_70b_8gpu --ranks 8"
)
_USABLE = 0.92  # of a GPU's memory: the rest is its context, libraries and fragments


def plan(
    arguments: RecipeWords,
    ranks: Annotated[
        int, Option(min=0, help="For so many ranks with a GPU each, without weights and data.")
    ] = 0,
    gpu_gib: Annotated[float, Option("--gpu-gib", min=1, help="Memory of a GPU.")] = 80.0,
    as_json: AsJson = False,
) -> None:
    """Predict what a recipe costs on this machine; `fledge train` prints the truth beside it.

    With --ranks, what it would cost on so many GPUs: from the target's configuration alone, for the
    steps that training.steps says. Either way it says among how many ranks (training.context) a
    pack has to be shared to fit.
    """
    begin = time.perf_counter()
    recipe = recipe_of_words(arguments)
    quiet_libraries()
    if ranks:
        from fledge.train.forecast import Forecast

        forecast = Forecast.of(recipe, ranks)
        predicted, step = forecast.predict(), forecast.step
        title = f"{counted(recipe.training.steps, 'step')} on {counted(ranks, 'rank')}"
        warnings: list[str] = []
    else:
        predicted, step, title, warnings = _tried_out(recipe, begin)
    needed = _context_needed(predicted, step, gpu_gib)
    if as_json:
        more = {"warnings": warnings, "context_needed": needed, "gpu_gib": gpu_gib}
        print_json({**predicted.to_json(), **more})
        return
    out.print(f"{title}, {counted(predicted.tokens, 'token')}")
    out.print(predicted.table())
    asked = f"a pack of {step.tokens:,} tokens in {gpu_gib:g} GiB"
    out.print(
        f"{asked}: fits no number of ranks beside target and draft; see target.parallel"
        if needed is None
        else f"{asked}: training.context={needed}{' or more' if needed > 1 else ' is enough'}"
    )
    for line in warnings:
        out.say(f"warning: {line}", style="yellow")


def _tried_out(recipe: Any, begin: float) -> tuple["Prediction", Any, str, list[str]]:
    """The prediction for this machine, from a run that is set up."""
    from fledge.train.predict import predict, step_memory
    from fledge.train.setup import set_up

    with progress_bar("preparing data", "parts") as update:
        training = set_up(recipe, show_set_up(update))
        update(description="trying out this machine")
        predicted = predict(training, begin)
    stream = training.stream
    title = f"{counted(stream.steps, 'step')}, padding {stream.padding_share:.2%}"
    return predicted, step_memory(training), title, training.warnings


def _context_needed(predicted: "Prediction", step: Any, gpu_gib: float) -> int | None:
    """Among how many ranks a pack must be shared, beside what stays."""
    from fledge.train.memory import context_needed

    free = gpu_gib * 2**30 * _USABLE - predicted.target_bytes - predicted.draft_bytes
    return context_needed(step, free)
