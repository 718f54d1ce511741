"""`fledge bench`: compare a running server with the draft to one without it."""

from typing import Annotated, Any

from typer import Argument, Option

from fledge.cli import options as opt
from fledge.cli.console import out, plain_table, print_json, watching
from fledge.core.addresses import server_address
from fledge.core.errors import BadInput
from fledge.core.install import install_extra

EXAMPLE = (
    "Example: fledge bench http://localhost:8000 --baseline http://localhost:8001 --concurrency 1 "
    "--concurrency 8"
)


def bench(
    url: Annotated[
        str, Argument(metavar="URL", help="An OpenAI-compatible server with the draft.")
    ],
    baseline: Annotated[str, Option(help="The same target served without it.")] = "",
    model: Annotated[str, Option(help="Default: what each server names first.")] = "",
    prompts: opt.Prompts = None,
    requests: Annotated[int, Option(min=1, help="Requests to measure.")] = 64,
    concurrency: Annotated[
        list[int] | None, Option(min=1, help="Requests at a time; repeatable. Default: 1.")
    ] = None,
    max_tokens: Annotated[int, Option(min=2, help="Length limit of answers.")] = 256,
    temperature: Annotated[float, Option(min=0, help="Of sampling; 0: greedy.")] = 0.0,
    as_json: opt.AsJson = False,
) -> None:
    """Measure a server: tokens per second, latencies, and acceptance by the engine's own counters.

    Both servers get the same requests, one server after the other. Latencies are the client's: to
    the first token, per token after it, and of the whole request.
    """
    from fledge.measure.prompts import read_prompts

    try:
        from fledge.bench.server import Load, measure_server
    except ModuleNotFoundError as error:
        fix = install_extra("serve")
        raise BadInput(f"{error.name} is not installed", fix=fix) from None
    conversations = [
        [{"role": message["role"], "content": message["content"]} for message in prompt.messages]
        for prompt in read_prompts(prompts or ["mixed"])
    ]
    servers = [("baseline", baseline)] * bool(baseline) + [("draft", url)]
    for _, address in servers:
        server_address(address)
    levels = concurrency or [1]
    runs: list[tuple[str, Any]] = []
    with watching() as watch:
        for level in levels:
            load = Load(conversations, requests, level, max_tokens, temperature)
            for name, address in servers:
                label = f"{name}, {level} at a time"

                def on_answer(done: int, label: str = label) -> None:
                    watch(label, done, requests)

                on_answer(0)
                runs.append((name, measure_server(address, load, model=model, on_answer=on_answer)))
    if as_json:
        print_json([{"server": name, **run.to_json()} for name, run in runs])
    else:
        _show(runs)


def _show(runs: list[tuple[str, Any]]) -> None:
    table = plain_table(
        "server", "at a\ntime", "tokens/s", "speed-up", "first token\np50 / p99 ms",
        "per token\np50 / p99 ms", "request\np50 / p99 ms", "acceptance\nlength",
        no_wrap=True,
    )  # fmt: skip
    plain = {run.concurrency: run.tokens_per_s for name, run in runs if name == "baseline"}
    for name, run in runs:
        base = plain.get(run.concurrency)
        gain = f"{run.tokens_per_s / base:.2f}x" if base and name == "draft" else ""
        times = [_pair(values) for values in (run.first_ms, run.per_token_ms, run.total_ms)]
        length = "" if run.acceptance is None else f"{run.acceptance.length:.3f}"
        speed = f"{run.tokens_per_s:,.1f}"
        table.add_row(name, str(run.concurrency), speed, gain, *times, length)
    out.print(table)
    drafted = [run for name, run in runs if name == "draft"]
    for definition in dict.fromkeys(
        (run.acceptance.source, run.acceptance.last_round) for run in drafted if run.acceptance
    ):
        out.print(
            f"acceptance length = 1 + accepted / drafted rounds: {definition[0]}.", style="dim"
        )
        out.print(f"A round that the end of an answer cuts short {definition[1]}.", style="dim")
    if not any(run.acceptance for run in drafted):
        silent = "the server reports nothing about speculative decoding: is the draft on?"
        out.print(f"{silent} SGLang needs --enable-metrics", style="yellow")


def _pair(values: dict[str, float]) -> str:
    return f"{values['p50']:.1f} / {values['p99']:.1f}" if values else "-"
