"""`fledge plan --cluster`: the table about clusters, a column for each target."""

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
    """Size a cluster for the recipe's own target, or for those of some sizes."""
    from fledge.train.planning.sizing import size_cluster

    found = [size_cluster(recipes, given, shape).to_json() for shape in shapes or ("",)]
    if as_json:
        print_json(found)
        return
    out.print(_table(found, shapes))
    out.print(
        f"samples of {counted(given.sample_tokens, 'token')}, each counted as often as it is "
        f"trained on; {given.gpu_hour:g} a GPU hour; {given.link_bytes / 1e9:g} GB/s into a rank"
    )
    if shapes:
        pairs = zip(shapes, map(_name, found), strict=True)
        out.print(", ".join(f"{shape}: {name}" for shape, name in pairs))
    for line in _basis(found):
        out.say(line, style="dim")
    for one in found:
        if one["bytes_per_train_gpu"] > given.gpu.usable_bytes:
            what = f"the draft of {_name(one)} does not fit a GPU that trains"
            out.say(f"warning: {what}; see packing.tokens and training.shard", style="yellow")


def _table(found: Sequence[dict[str, Any]], shapes: Sequence[str]) -> Table:
    shown = plain_table("a cluster", *(shapes or map(_name, found)), no_wrap=True)
    rows = [_rows(one) for one in found]
    for title in rows[0]:
        shown.add_row(title, *(row[title] for row in rows))
    return shown


def _name(one: dict[str, Any]) -> str:
    return str(one["model"]).rpartition("/")[2]


def _rows(one: dict[str, Any]) -> dict[str, str]:
    flow = one["bytes_per_s"]
    split = f" x {one['gpus_per_worker']}" if one["gpus_per_worker"] > 1 else ""
    rows = {
        "parameters": _billions(one["parameters"]),
        "  active": _billions(one["active_parameters"]),
        "tokens/s of a worker": f"{one['worker_tokens_per_s']:,.0f}",
        "tokens/s of a rank": f"{one['rank_tokens_per_s']:,.0f}",
        "GPUs for capture": f"{one['target_workers']}{split}",
        "  GiB on each": f"{one['bytes_per_capture_gpu'] / 2**30:.0f}",
        "GPUs for training": str(one["train_gpus"]),
        "  GiB on each ": f"{one['bytes_per_train_gpu'] / 2**30:.0f}",
        "target.prefetch": str(one["prefetch"]),
        "tokens/s, simulated": f"{one['tokens_per_s']:,.0f}",
        "  ranks wait": f"{one['waiting_share']:.0%}",
        "  workers busy": f"{one['busy_share']:.0%}",
        "bytes a token": f"{one['bytes_per_token']:,}",
        "  worker to store": f"{_size(flow['worker_to_store'])}/s",
        "  stores to a rank": f"{_size(flow['store_to_rank'])}/s",
        "  stores to all": f"{_size(flow['store_to_ranks'])}/s",
    }
    for asked in one["samples"]:
        many = f"{asked['samples'] / 1e6:g} M samples"
        rows[f"{many}, hours"] = _hours(asked["hours"])
        rows[f"{many}, cost"] = f"{asked['cost']:,.0f}"
        rows[f"{many}, cache"] = _size(asked["cache_bytes"])
    rows["  cache written"] = f"{_size(flow['cache_written'])}/s"
    return {**rows, "  cache read": f"{_size(flow['cache_read'])}/s"}


def _basis(found: Sequence[dict[str, Any]]) -> list[str]:
    """What is measured and what is scaled, in words."""

    def scales(key: str) -> str:
        return ", ".join("given" if one[key] is None else f"x {one[key]:.2f}" for one in found)

    return [
        f"measured: targets and EAGLE-3 steps of 135M, 1B and 8B on one H200 ({MEASURED})",
        f"scaled, operations in those of the 8B step: targets {scales('worker_operations')}; "
        f"ranks {scales('rank_operations')}",
        "assumed: links, prices, GPUs of a worker joined by NVLink, experts that share the load",
    ]


def _billions(count: int) -> str:
    return f"{count / 1e9:,.0f} B" if count >= 1e10 else f"{count / 1e9:.1f} B"


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours < 100 else f"{hours:,.0f}"


def _size(count: float) -> str:
    for unit, name in _UNITS:
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:.0f} B"
