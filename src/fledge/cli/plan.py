"""`fledge plan`: predict memory, disk and hours of a run before it starts."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.errors import BadInput
from fledge.core.terminal import counted

if TYPE_CHECKING:
    from fledge.training.planning.prediction import Prediction

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
    pack for it to fit.

    With --cluster, how many GPUs for capture and how many for training keep each other busy, what
    every link carries, hours and cost for 1 and 100 million samples; --ranks fixes the number of
    those that train. The options after --cluster are for it alone.
    """
    begin = time.perf_counter()
    recipes = [recipe_of_words(arguments)]
    quiet_libraries()
    if cluster:
        from fledge.training.planning.sizing import Given, gpu_of

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
    pack = f"a pack of {step.rows.tokens:,} tokens in {gpu_gib:g} GiB"
    out.print(
        f"{pack}: fits no number of ranks beside target and draft; see target.parallel"
        if needed is None
        else f"{pack}: training.context={needed}{' or more' if needed > 1 else ' is enough'}"
    )
    for line in warnings:
        out.say(f"warning: {line}", style="yellow")


def _by_shape(recipes: Sequence[Any], ranks: int) -> tuple["Prediction", Any, str]:
    """The prediction for GPUs that this machine need not have."""
    from fledge.training.planning.prediction import Prediction
    from fledge.training.planning.shape_plan import ShapePlan

    plans = [ShapePlan.of(recipe, ranks) for recipe in recipes]
    predicted = [shape_plan.predict(asks=shape_plan is plans[0]) for shape_plan in plans]
    steps = counted(recipes[0].training.steps, "step")
    step = max((shape_plan.step for shape_plan in plans), key=lambda step: step.bytes())
    return Prediction.of_all(predicted), step, f"{steps} on {counted(ranks, 'rank')}"


def _by_trial(recipes: Sequence[Any], begin: float) -> tuple["Prediction", Any, str, list[str]]:
    """The prediction for this machine, measured on runs that are set up but not started."""
    from fledge.training.planning.prediction import predict_together, step_memory
    from fledge.training.setup import set_up

    with progress_bar("preparing data") as progress:
        trainings = [set_up(recipes[0], progress)]
        progress("trying out this machine")
        predicted = predict_together(trainings, begin)
    stream = trainings[0].stream
    title = f"{counted(stream.steps, 'step')}, padding {stream.padding_share:.2%}"
    step = max(map(step_memory, trainings), key=lambda step: step.bytes())
    return predicted, step, title, trainings[0].warnings


def _context_needed(predicted: "Prediction", step: Any, gpu_gib: float) -> int | None:
    """How many ranks must share a pack, given what target and draft occupy."""
    from fledge.training.planning.cost import USABLE, context_needed

    free = gpu_gib * 2**30 * USABLE - predicted.target_bytes - predicted.draft_bytes
    return context_needed(step, free)


# --- plan cluster --------------------------------------------------------------------------------
# `fledge plan --cluster`: the table of cluster sizes, with one column per target.


_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MEASURED = "benchmarks/results/train_step.md"


def plan_cluster(
    recipes: Sequence[Any], given: Any, shapes: Sequence[str], *, as_json: bool
) -> None:
    """Size a cluster for the recipe's own target, or for each of the target shapes."""
    from fledge.training.planning.sizing import size_cluster

    sizes = [size_cluster(recipes, given, shape).to_json() for shape in shapes or ("",)]
    if as_json:
        print_json(sizes)
        return
    out.print(_table(sizes, shapes))
    out.print(
        f"samples of {counted(given.sample_tokens, 'token')}, each counted as often as it is "
        f"trained on; {given.gpu_hour:g} a GPU hour; {given.link_bytes / 1e9:g} GB/s into a rank"
    )
    if shapes:
        pairs = zip(shapes, map(_name, sizes), strict=True)
        out.print(", ".join(f"{shape}: {name}" for shape, name in pairs))
    for line in _basis(sizes):
        out.say(line, style="dim")
    for size in sizes:
        if size["bytes_per_train_gpu"] > given.gpu.usable_bytes:
            what = f"the draft of {_name(size)} does not fit a GPU that trains"
            out.say(f"warning: {what}; see packing.tokens and training.shard", style="yellow")


def _table(sizes: Sequence[dict[str, Any]], shapes: Sequence[str]) -> Table:
    table = plain_table("a cluster", *(shapes or map(_name, sizes)), no_wrap=True)
    rows = [_rows(size) for size in sizes]
    for title in rows[0]:
        table.add_row(title, *(row[title] for row in rows))
    return table


def _name(size: dict[str, Any]) -> str:
    return str(size["model"]).rpartition("/")[2]


def _rows(size: dict[str, Any]) -> dict[str, str]:
    flow = size["bytes_per_s"]
    split = f" x {size['gpus_per_worker']}" if size["gpus_per_worker"] > 1 else ""
    rows = {
        "parameters": _billions_text(size["parameters"]),
        "  active": _billions_text(size["active_parameters"]),
        "tokens/s of a worker": f"{size['worker_tokens_per_s']:,.0f}",
        "tokens/s of a rank": f"{size['rank_tokens_per_s']:,.0f}",
        "GPUs for capture": f"{size['target_workers']}{split}",
        "  GiB on each": f"{size['bytes_per_capture_gpu'] / 2**30:.0f}",
        "GPUs for training": str(size["train_gpus"]),
        "  GiB on each ": f"{size['bytes_per_train_gpu'] / 2**30:.0f}",
        "target.prefetch": str(size["prefetch"]),
        "tokens/s of all": f"{size['tokens_per_s']:,.0f}",
        "  ranks wait": f"{size['waiting_share']:.0%}",
        "  workers busy": f"{size['busy_share']:.0%}",
        "bytes a token": f"{size['bytes_per_token']:,}",
        "  worker to store": f"{_bytes_text(flow['worker_to_store'])}/s",
        "  stores to a rank": f"{_bytes_text(flow['store_to_rank'])}/s",
        "  stores to all": f"{_bytes_text(flow['store_to_ranks'])}/s",
    }
    for samples in size["samples"]:
        label = f"{samples['samples'] / 1e6:g} M samples"
        rows[f"{label}, hours"] = _hours_text(samples["hours"])
        rows[f"{label}, cost"] = f"{samples['cost']:,.0f}"
        rows[f"{label}, cache"] = _bytes_text(samples["cache_bytes"])
    rows["  cache written"] = f"{_bytes_text(flow['cache_written'])}/s"
    return {**rows, "  cache read": f"{_bytes_text(flow['cache_read'])}/s"}


def _basis(sizes: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on what is measured, what is scaled and what is assumed."""

    def scales(key: str) -> str:
        return ", ".join("given" if size[key] is None else f"x {size[key]:.2f}" for size in sizes)

    return [
        f"measured: targets and EAGLE-3 steps of 135M, 1B and 8B on one H200 ({MEASURED})",
        f"scaled, operations in those of the 8B step: targets {scales('worker_operations')}; "
        f"ranks {scales('rank_operations')}",
        "assumed: links, prices, GPUs of a worker joined by NVLink, experts that share the load",
    ]


def _billions_text(count: int) -> str:
    return f"{count / 1e9:,.0f} B" if count >= 1e10 else f"{count / 1e9:.1f} B"


def _hours_text(hours: float) -> str:
    return f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}"


def _bytes_text(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
