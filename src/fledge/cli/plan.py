"""`fledge plan`: predict memory, disk and hours of a run before it starts."""

import time
from typing import Annotated, Any

from typer import Option

from fledge.cli.console import out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.terminal import counted

EXAMPLE = (
    "Example: fledge plan smollm2_gpu data.train=chats.jsonl\n\n"
    "Example: fledge plan llama33_70b_8gpu --ranks 8"
)


def plan(
    arguments: RecipeWords,
    ranks: Annotated[
        int, Option(min=0, help="For this many ranks with a GPU each, without weights and data.")
    ] = 0,
    gpu_gib: Annotated[float, Option("--gpu-gib", min=1, help="Memory of a GPU.")] = 80.0,
    as_json: AsJson = False,
) -> None:
    """Predict what a recipe costs on this machine; `fledge train` prints the truth beside it.

    With --ranks, what it would cost on that many GPUs: from the target's configuration alone, for
    training.steps steps. Either way it reports how many ranks (training.context) have to share a
    pack for it to fit.
    """
    begin = time.perf_counter()
    recipe = recipe_of_words(arguments)
    quiet_libraries()
    from fledge.training.planning.step_cost import USABLE

    predicted, step, title, warnings = (
        _by_shape(recipe, ranks) if ranks else _by_trial(recipe, begin)
    )
    # how many ranks must share a pack, given what target and draft occupy
    free_bytes = gpu_gib * 2**30 * USABLE - predicted.target_bytes - predicted.draft_bytes
    needed = step.context_needed(free_bytes)
    if as_json:
        extra = {"warnings": warnings, "context_needed": needed, "gpu_gib": gpu_gib}
        print_json({**predicted.to_json(), **extra})
        return
    out.print(f"{title}, {counted(predicted.tokens, 'token')}")
    out.print(predicted.table())
    pack = f"a pack of {step.rows.tokens:,} tokens in {gpu_gib:g} GiB"
    out.print(
        f"{pack}: fits no number of ranks beside target and draft; see target.parallel"
        if needed is None
        else f"{pack}: training.context={needed}{' or more' if needed > 1 else ' is enough'}"
    )
    for line in warnings:
        out.say(f"warning: {line}", style="yellow")


_Planned = tuple[Any, Any, str, list[str]]  # prediction, step, title, warnings


def _by_shape(recipe: Any, ranks: int) -> _Planned:
    """For GPUs that this machine need not have."""
    from fledge.training.planning.shape_plan import ShapePlan

    shape_plan = ShapePlan.of(recipe, ranks)
    title = f"{counted(recipe.training.steps, 'step')} on {counted(ranks, 'rank')}"
    return shape_plan.predict(), shape_plan.step, title, []


def _by_trial(recipe: Any, begin: float) -> _Planned:
    """For this machine, measured on a run that is set up but not started."""
    from fledge.training.planning.prediction import predict, step_memory
    from fledge.training.setup import set_up

    with progress_bar("preparing data") as progress:
        training = set_up(recipe, progress)
        progress("trying out this machine")
        predicted = predict(training, begin)
    stream = training.stream
    title = f"{counted(stream.steps, 'step')}, padding {stream.padding_share:.2%}"
    return predicted, step_memory(training), title, training.warnings
