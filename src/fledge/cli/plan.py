"""`fledge plan`: predict memory, disk and hours of a run before it starts."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

from typer import Option

from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import recipe_of_words
from fledge.cli.options import AsJson, RecipeWords
from fledge.core.errors import BadInput
from fledge.core.terminal import counted

EXAMPLE = (
    "Example: fledge plan smollm2_gpu data.train=chats.jsonl\n\n"
    "Example: fledge plan llama33_70b_8gpu --ranks 8\n\n"
    "Example: fledge plan llama31_8b_8gpu --cluster --target-shape 70b --target-shape 1t-moe"
)
_GPU_GIB = 80.0
_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


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

    With --cluster, how many GPUs for capture and how many for training keep each other busy, and
    hours and cost for 1 and 100 million samples; --ranks fixes the number of those that train. The
    options after --cluster are for it alone.
    """
    begin = time.perf_counter()
    recipe = recipe_of_words(arguments)
    quiet_libraries()
    if cluster:
        from fledge.training.planning.sizing import Given, gpu_of, size_cluster

        given = Given(
            gpu_of(gpu, gpu_gib), link_gb_s * 1e9, gpu_hour, sample_tokens, ranks,
            target_tokens_s=capture_tokens_s, train_tokens_s=train_tokens_s,
        )  # fmt: skip
        shapes = target_shape or [""]
        sizes = [size_cluster(recipe, given, shape) for shape in shapes]
        if as_json:
            print_json(sizes)
        else:
            _show_cluster(sizes, given, shapes)
        return
    if target_shape or capture_tokens_s or train_tokens_s:
        what = "a target's size and rates are for a cluster on paper"
        raise BadInput(what, where="--target-shape", fix="add --cluster")
    from fledge.training.planning.step_cost import USABLE

    predicted, step, title, warnings = (
        _by_shape(recipe, ranks) if ranks else _by_trial(recipe, begin)
    )
    gpu_gib = gpu_gib or _GPU_GIB
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


def _show_cluster(sizes: Sequence[dict[str, Any]], given: Any, shapes: Sequence[str]) -> None:
    """One column per target, and on what the figures are based."""
    names = [str(size["model"]).rpartition("/")[2] for size in sizes]
    columns = [shape or name for shape, name in zip(shapes, names, strict=True)]
    table = plain_table("a cluster", *columns, no_wrap=True)
    rows = [_rows(size) for size in sizes]
    for title in rows[0]:
        table.add_row(title, *(row[title] for row in rows))
    out.print(table)
    out.print(
        f"samples of {counted(given.sample_tokens, 'token')}, each counted as often as it is "
        f"trained on; {given.gpu_hour:g} a GPU hour; {given.link_bytes / 1e9:g} GB/s into a rank"
    )
    if shapes[0]:
        out.print(", ".join(map(": ".join, zip(shapes, names, strict=True))))
    targets, ranks = (
        ", ".join("given" if size[key] is None else f"x {size[key]:.2f}" for size in sizes)
        for key in ("worker_operations", "rank_operations")
    )
    for line in (
        "measured: targets and EAGLE-3 steps of 135M, 1B and 8B on one H200 "
        "(benchmarks/results/train_step.md)",
        f"scaled, operations in those of the 8B step: targets {targets}; ranks {ranks}",
        "assumed: links, prices, GPUs of a worker joined by NVLink, experts that share the load",
    ):
        out.say(line, style="dim")
    for size, name in zip(sizes, names, strict=True):
        if size["bytes_per_train_gpu"] > given.gpu.usable_bytes:
            what = f"the draft of {name} does not fit a GPU that trains"
            out.say(f"warning: {what}; see packing.tokens and training.shard", style="yellow")


def _rows(size: dict[str, Any]) -> dict[str, str]:
    split = f" x {size['gpus_per_worker']}" if size["gpus_per_worker"] > 1 else ""
    rows = {
        "parameters": _billions(size["parameters"]),
        "  active": _billions(size["active_parameters"]),
        "tokens/s of a worker": f"{size['worker_tokens_per_s']:,.0f}",
        "tokens/s of a rank": f"{size['rank_tokens_per_s']:,.0f}",
        "GPUs for capture": f"{size['target_workers']}{split}",
        "  GiB on each": f"{size['bytes_per_capture_gpu'] / 2**30:.0f}",
        "GPUs for training": str(size["train_gpus"]),
        "  GiB on each ": f"{size['bytes_per_train_gpu'] / 2**30:.0f}",
        "  they wait": f"{size['waiting_share']:.0%}",
        "  each receives": f"{_bytes(size['bytes_per_s_to_rank'])}/s",
        "tokens/s of all": f"{size['tokens_per_s']:,.0f}",
    }
    for samples in size["samples"]:
        label, hours = f"{samples['samples'] / 1e6:g} M samples", samples["hours"]
        rows[f"{label}, hours"] = f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}"
        rows[f"{label}, cost"] = f"{samples['cost']:,.0f}"
        rows[f"{label}, cache"] = _bytes(samples["cache_bytes"])
    return rows


def _billions(count: int) -> str:
    return f"{count / 1e9:,.0f} B" if count >= 1e10 else f"{count / 1e9:.1f} B"


def _bytes(count: float) -> str:
    unit, name = next(((unit, name) for unit, name in _UNITS if count >= unit), (1.0, "B"))
    return f"{count / unit:.3g} {name}"
