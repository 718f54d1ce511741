"""`fledge bench`: how fast a training step and decoding run here, and a draft on a server."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Annotated, Any

from typer import Argument, Option

from fledge.api import shortest_names
from fledge.cli import options as opt
from fledge.cli.console import (
    facts_table,
    out,
    plain_table,
    print_json,
    progress_bar,
    quiet_libraries,
)
from fledge.cli.help import VerbGroup, Verbs
from fledge.cli.llamacpp import ENGINE, gguf_pair, runs_in_llama_cpp
from fledge.cli.loading import target_options
from fledge.cli.options import AsJson
from fledge.core.addresses import server_address
from fledge.core.errors import BadInput, nearest
from fledge.core.install import install_extra


class _ServerByDefault(VerbGroup):
    """`fledge bench URL` is short for `fledge bench server URL`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            args = ["server", *args]
        return super().resolve_command(ctx, args)


app = Verbs(
    cls=_ServerByDefault,
    epilog="Example: fledge bench http://localhost:8000",
    help="Measure speed: of a training step (train), of decoding with drafts (decode), or of a "
    "server (server URL, or just URL).",
)

TRAIN_EXAMPLE = (
    "Example: fledge bench train --shape 8b --seq 2048 --batch 4\n\n"
    "Example: fledge bench train --shape 135m --seq 16384 --documents 250"
)


def bench_train(
    shape: Annotated[str, Option(help="Target's shape: tiny, 135m, 1b or 8b.")] = "135m",
    kind: Annotated[
        str, Option(help="The method, as objective.kind names it; default: EAGLE-3.")
    ] = "",
    seq: Annotated[int, Option(min=8, help="Tokens a row.")] = 2048,
    batch: Annotated[int, Option(min=1, help="Rows a step.")] = 1,
    documents: Annotated[
        int, Option(min=0, help="Pack documents of about so many tokens; 0: one a row.")
    ] = 0,
    supervised: Annotated[
        float, Option(min=0.01, max=1.0, help="Share of the tokens that are supervised.")
    ] = 0.6,
    depths: Annotated[int, Option(min=0, help="0: as the method's recipes.")] = 0,
    depth_keep: Annotated[
        float, Option(min=0.05, max=1.0, help="EAGLE-3: objective.depth_keep.")
    ] = 1.0,
    fp8: Annotated[bool, Option("--fp8", help="Target in fp8.")] = False,
    kept: Annotated[
        bool, Option("--kept", help="Measure a later epoch, whose states are kept.")
    ] = False,
    steps: Annotated[int, Option(min=1, help="Steps measured; the median counts.")] = 5,
    warmup: Annotated[int, Option(min=1, help="Steps before that.")] = 2,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokens per second, phase times and memory of one training step, on random weights."""
    quiet_libraries()
    from fledge.bench import train_step as bench
    from fledge.core.distributed import pick_device
    from fledge.methods.registry import DEFAULT_METHOD, METHODS

    where = pick_device(device)
    case = bench.Case(
        shape=shape, kind=kind or DEFAULT_METHOD, seq=seq, batch=batch, documents=documents,
        depths=depths, supervised=supervised, depth_keep=depth_keep, fp8=fp8, kept=kept,
    )  # fmt: skip
    for value, known in ((shape, list(bench.SHAPES)), (case.kind, list(METHODS))):
        if value not in known:
            raise BadInput(f"nothing is named '{value}' here", fix=nearest(value, known))
    with progress_bar(what := f"{case.kind} {shape}") as show:
        done = itertools.count(1)
        measured = bench.measure_step(
            case,
            where,
            steps=steps,
            warmup=warmup,
            on_step=lambda: show(what, next(done), steps + warmup, "steps"),
        )
    figures = {"kind": case.kind, "shape": shape, **measured.to_json()}
    if as_json:
        print_json(figures)
    else:
        texts = {k: f"{v:,}" if isinstance(v, int) else f"{v}" for k, v in figures.items()}
        out.print(facts_table(texts))


# --- server ---------------------------------------------------------------------------------------

SERVER_EXAMPLE = (
    "Example: fledge bench http://localhost:8000 --baseline http://localhost:8001 --concurrency 1 "
    "--concurrency 8"
)


def bench_server(
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
    from fledge.measure.answers import read_prompts

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
    runs: list[tuple[str, Any]] = []
    with progress_bar() as show:
        for level in concurrency or [1]:
            load = Load(conversations, requests, level, max_tokens, temperature)
            for name, address in servers:
                label = f"{name}, {level} at a time"
                show(label, 0, requests)

                def on_answer(done: int, label: str = label) -> None:
                    show(label, done, requests)

                runs.append((name, measure_server(address, load, model=model, on_answer=on_answer)))
    if as_json:
        print_json([{"server": name, **run.to_json()} for name, run in runs])
    else:
        _show_server(runs)


def _show_server(runs: list[tuple[str, Any]]) -> None:
    table = plain_table(
        "server", "at a\ntime", "tokens/s", "speed-up", "first token\np50 / p99 ms",
        "per token\np50 / p99 ms", "request\np50 / p99 ms", "acceptance\nlength",
        no_wrap=True,
    )  # fmt: skip
    plain = {run.concurrency: run.tokens_per_s for name, run in runs if name == "baseline"}
    sources: dict[str, None] = {}
    for name, run in runs:
        base, gain, length = plain.get(run.concurrency), "", ""
        if name == "draft" and base:
            gain = f"{run.tokens_per_s / base:.2f}x"
        if run.acceptance is not None:
            length = f"{run.acceptance.length:.3f}"
            if name == "draft":
                sources[run.acceptance.source] = None
        times = [
            f"{values['p50']:.1f} / {values['p99']:.1f}" if values else "-"
            for values in (run.first_ms, run.per_token_ms, run.total_ms)
        ]
        speed = f"{run.tokens_per_s:,.1f}"
        table.add_row(name, str(run.concurrency), speed, gain, *times, length)
    out.print(table)
    for source in sources:
        out.print(f"acceptance length = 1 + accepted / drafted rounds: {source}.", style="dim")
    if not sources:
        silent = "the server reports nothing about speculative decoding: is the draft on?"
        out.print(silent, style="yellow")


# --- decode ---------------------------------------------------------------------------------------

DECODE_EXAMPLE = (
    "Example: fledge bench decode runs/small runs/large --prompts questions.jsonl --batch 1 "
    "--batch 16"
)


def bench_decode(
    drafts: opt.DraftArguments,
    target: opt.TargetOption = "",
    engine: Annotated[
        str, Option(help="llama.cpp: decode in it too, in this process, with a GGUF target.")
    ] = "",
    prompts: opt.Prompts = None,
    limit: opt.PromptLimit = 16,
    batch: Annotated[
        list[int] | None, Option(min=1, help="Texts at a time; repeatable. Default: 1.")
    ] = None,
    method: Annotated[
        list[str] | None,
        Option(help="chain, tree, parallel, ... of drafts that have it; repeatable. Default: own."),
    ] = None,
    draft_tokens: opt.TrainedTokens = 0,
    max_new_tokens: opt.MeasuredTokens = 128,
    aux_layers: Annotated[
        str, Option(help="The layers that the drafts read, e.g. 1,14,26; default: the run's.")
    ] = "",
    dtype: opt.RunDtype = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.AsJson = False,
) -> None:
    """Decode the same prompts with drafts, by the target alone and by transformers, and compare.

    Tokens per second of whole calls. Texts are compared with those of the target alone. With
    --engine llama.cpp, its texts and speeds are compared with those of llama.cpp alone.
    """
    quiet_libraries()
    from fledge.bench import decode as ways_of
    from fledge.decode.stops import Stops, eos_token_ids
    from fledge.decode.strategy import check_name
    from fledge.measure.answers import read_prompts
    from fledge.measure.evaluation import check_fits
    from fledge.training.runs import (
        draft_directory,
        load_draft_beside,
        load_target,
        trained_tokens,
        with_layers_of,
    )

    for name in method or ():
        check_name(name)
    rows = read_prompts(prompts or ["mixed"], limit=limit or None)
    paths = dict(zip(shortest_names(drafts), map(draft_directory, drafts), strict=True))
    first = next(iter(paths.values()))
    loading = target_options(first, aux_layers, dtype, device, trust_remote_code)
    in_llama_cpp = runs_in_llama_cpp(engine)
    with ExitStack() as opened:
        backend = opened.enter_context(load_target(first, target, **loading))
        tokenizer, model = backend.tokenizer, backend.model
        ids = _encoded(rows, backend, max_new_tokens)
        stops = Stops(max_new_tokens, eos_token_ids(model, tokenizer))
        counts = {name: draft_tokens or trained_tokens(path) for name, path in paths.items()}
        device_used = backend.get_input_embeddings().weight.device
        pad_id = getattr(tokenizer, "pad_token_id", None) or 0
        ways = ways_of.draftless_ways(model, stops, pad_id=pad_id)
        for name, path in paths.items():
            reading = backend if aux_layers else with_layers_of(backend, path)
            draft = load_draft_beside(reading, path)
            check_fits(reading, draft, name)
            ways |= ways_of.draft_ways(
                reading, name, draft, stops, num_draft_tokens=counts[name], methods=method or ()
            )
        if in_llama_cpp:
            servers: dict[str, Any] = {}
            for name, path in zip(paths, drafts, strict=True):
                pair = opened.enter_context(gguf_pair(path, target, draft_tokens))
                servers.setdefault(ENGINE, pair.serve_plain())
                servers[f"{ENGINE}, {name}"] = pair.serve()
            for name, server in servers.items():
                ways[name] = ways_of.llama_cpp_way(opened.enter_context(server), stops)
        figures = []
        for size in batch or [1]:
            with progress_bar(f"batch {size}") as show:
                decoded = ways_of.decode_all(
                    ways, ids, batch=size, device=device_used, progress=show
                )
            figures += [result.to_json(decoded) for result in decoded.values()]
    if as_json:
        print_json(figures)
    else:
        _show_decode(figures)


def _encoded(prompts: Any, target: Any, max_new_tokens: int) -> list[list[int]]:
    """The tokens of the prompts that an answer fits behind."""
    from fledge.data.template import ChatTemplate
    from fledge.measure.answers import encode_prompt
    from fledge.target.layers import longest_text

    if target.tokenizer is None:
        raise BadInput("the target has no tokenizer", fix="prompts are texts: give it one")
    template, longest = ChatTemplate.of(target.tokenizer), longest_text(target.model.config)
    chats = (list(prompt.messages) for prompt in prompts)
    encoded = (encode_prompt(chat, template, target.tokenizer) for chat in chats)
    fitting = [ids for ids in encoded if len(ids) + max_new_tokens <= longest]
    if not fitting:
        raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
    return fitting


def _show_decode(figures: Sequence[Mapping[str, Any]]) -> None:
    for batch in dict.fromkeys(row["batch"] for row in figures):
        shown = plain_table(
            "way", "tokens/s", "passes/s", "tokens\na round", "against\nplain",
            "against\ngenerate", "texts\nas plain", no_wrap=True, title=f"batch {batch}",
        )  # fmt: skip
        shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"
        for row in figures:
            if row["batch"] == batch:
                length = row["tokens_per_round"]
                shown.add_row(
                    row["way"], f"{row['tokens_per_s']:,.1f}", f"{row['passes_per_s']:,.1f}",
                    "" if length is None else f"{length:.2f}", f"{row['against_plain']:.2f}x",
                    f"{row['against_transformers']:.2f}x",
                    f"{row['texts_as_plain']} of {row['texts']}",
                )  # fmt: skip
        out.print(shown)
    note = "Whole calls, the passes over the prompts included; plain: fledge without a draft."
    out.print(note, style="dim")


app.command(name="server", epilog=SERVER_EXAMPLE)(bench_server)
app.command(name="decode", epilog=DECODE_EXAMPLE)(bench_decode)
app.command(name="train", epilog=TRAIN_EXAMPLE)(bench_train)
