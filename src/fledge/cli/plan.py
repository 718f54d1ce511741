"""`fledge plan`: predict memory, disk and hours of a run before it starts."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from fledge.cli.console import out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipes_of_words, show_set_up
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.errors import BadInput
from fledge.core.text import counted

if TYPE_CHECKING:
    from fledge.train.planning.predict import Prediction

EXAMPLE = (
    "Example: fledge plan smollm2_gpu data.train=chats.jsonl\n\n"
    "Example: fledge plan llama33_70b_8gpu --ranks 8\n\n"
    "Example: fledge plan llama31_8b_8gpu --cluster --target-shape 70b --target-shape 1t-moe"
)
_GPU_GIB = 80.0


def plan(
    arguments: RecipeWords,
    ranks: Annotated[
        int, Option(min=0, help="For this many ranks with a GPU each, without weights and data.")
    ] = 0,
    gpu_gib: Annotated[
        float | None,
        Option("--gpu-gib", min=1, help="Memory of a GPU; default: 80, or as --gpu has."),
    ] = None,
    cluster: Annotated[
        bool, Option("--cluster", help="Size a cluster: targets and trainers apart.")
    ] = False,
    target_shape: Annotated[
        list[str] | None,
        Option(help="Instead of the recipe's target: 8b, 70b, 235b-moe or 1t-moe; repeatable."),
    ] = None,
    gpu: Annotated[str, Option(help="h200 (measured), h100, a100 or b200 (scaled).")] = "h200",
    link_gb_s: Annotated[
        float, Option("--link-gb-s", min=0.001, help="GB/s that one rank receives.")
    ] = 3.0,
    gpu_hour: Annotated[float, Option(min=0.0, help="Price of a GPU hour.")] = 3.0,
    sample_tokens: Annotated[int, Option(min=1, help="Mean length of a sample.")] = 1024,
    capture_tokens_s: Annotated[
        float | None, Option(min=1.0, help="Tokens/s of one target worker, as you measured it.")
    ] = None,
    train_tokens_s: Annotated[
        float | None, Option(min=1.0, help="Tokens/s of one rank that waits for no target.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict what a recipe costs on this machine; `fledge train` prints the truth beside it.

    With --ranks, what it would cost on that many GPUs: from the target's configuration alone, for
    training.steps steps. Either way it reports how many ranks (training.context) have to share a
    pack for it to fit. A recipe of several drafts costs the target's time once.

    With --cluster, how many GPUs for capture and how many for training keep each other busy, what
    every link carries, hours and cost for 1 and 100 million samples; --ranks fixes the number of
    those that train. The options after --cluster are for it alone.
    """
    begin = time.perf_counter()
    recipes = [*recipes_of_words(arguments).values()]
    quiet_libraries()
    if cluster:
        from fledge.cli.plan_cluster import plan_cluster
        from fledge.train.planning.sizing import Given, gpu_of

        given = Given(
            gpu=gpu_of(gpu, gpu_gib),
            link_bytes=link_gb_s * 1e9,
            gpu_hour=gpu_hour,
            sample_tokens=sample_tokens,
            ranks=ranks,
            target_tokens_s=capture_tokens_s,
            train_tokens_s=train_tokens_s,
        )
        plan_cluster(recipes, given, target_shape or (), as_json=as_json)
        return
    if target_shape or capture_tokens_s or train_tokens_s:
        what = "a target's size and rates are for a cluster on paper"
        raise BadInput(what, where="--target-shape", fix="add --cluster")
    gpu_gib = gpu_gib or _GPU_GIB
    if ranks:
        predicted, step, title = _by_shape(recipes, ranks)
        warnings: list[str] = []
    else:
        predicted, step, title, warnings = _by_trial(recipes, begin)
    needed = _context_needed(predicted, step, gpu_gib)
    if as_json:
        extra = {"warnings": warnings, "context_needed": needed, "gpu_gib": gpu_gib}
        print_json({**predicted.to_json(), **extra})
        return
    out.print(f"{title}, {counted(predicted.tokens, 'token')}")
    out.print(predicted.table())
    pack = f"a pack of {step.tokens:,} tokens in {gpu_gib:g} GiB"
    out.print(
        f"{pack}: fits no number of ranks beside target and draft; see target.parallel"
        if needed is None
        else f"{pack}: training.context={needed}{' or more' if needed > 1 else ' is enough'}"
    )
    for line in warnings:
        out.say(f"warning: {line}", style="yellow")


def _by_shape(recipes: Sequence[Any], ranks: int) -> tuple["Prediction", Any, str]:
    """The prediction for GPUs that this machine need not have."""
    from fledge.train.planning.predict import Prediction
    from fledge.train.planning.shape_plan import ShapePlan

    plans = [ShapePlan.of(recipe, ranks) for recipe in recipes]
    predicted = [shape_plan.predict(asks=shape_plan is plans[0]) for shape_plan in plans]
    steps = counted(recipes[0].training.steps, "step")
    step = max((shape_plan.step for shape_plan in plans), key=lambda step: step.bytes())
    return Prediction.of_all(predicted), step, f"{steps} on {counted(ranks, 'rank')}"


def _by_trial(recipes: Sequence[Any], begin: float) -> tuple["Prediction", Any, str, list[str]]:
    """The prediction for this machine, measured on runs that are set up but not started."""
    from fledge.train.planning.predict import predict_together, step_memory
    from fledge.train.setup import set_up_together

    with progress_bar("preparing data", "parts") as update:
        trainings = set_up_together(recipes, show_set_up(update))
        update(description="trying out this machine")
        predicted = predict_together(trainings, begin)
    stream = trainings[0].stream
    title = f"{counted(stream.steps, 'step')}, padding {stream.padding_share:.2%}"
    step = max(map(step_memory, trainings), key=lambda step: step.bytes())
    return predicted, step, title, trainings[0].warnings


def _context_needed(predicted: "Prediction", step: Any, gpu_gib: float) -> int | None:
    """How many ranks must share a pack, given what target and draft occupy."""
    from fledge.train.planning.memory import USABLE, context_needed

    free = gpu_gib * 2**30 * USABLE - predicted.target_bytes - predicted.draft_bytes
    return context_needed(step, free)
