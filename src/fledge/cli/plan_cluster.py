"""`fledge plan --cluster`: the table of cluster sizes, with one column per target."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from fledge.cli.console import out, plain_table, print_json
from fledge.core.text import counted

_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
MEASURED = "benchmarks/results/train_step.md"


def plan_cluster(
    recipes: Sequence[Any], given: Any, shapes: Sequence[str], *, as_json: bool
) -> None:
    """Size a cluster for the recipe's own target, or for each of the target shapes."""
    from fledge.train.planning.sizing import size_cluster

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
        "tokens/s, simulated": f"{size['tokens_per_s']:,.0f}",
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
