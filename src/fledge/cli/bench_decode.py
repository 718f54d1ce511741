"""`fledge bench decode`: drafts against the target alone and against transformers, in one run."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from typer import Option

from fledge.api import shortest_names
from fledge.cli import options as opt
from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import load_draft_beside, load_target
from fledge.core.errors import BadInput

EXAMPLE = (
    "Example: fledge bench decode runs/small runs/large --prompts questions.jsonl --batch 1 "
    "--batch 16"
)


def bench(
    drafts: opt.DraftArguments,
    target: opt.TargetOption = "",
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
    assistant: Annotated[
        str, Option(help="A small model for transformers' assisted generation.")
    ] = "",
    aux_layers: Annotated[
        str, Option(help="The layers that the drafts read, e.g. 1,14,26; default: the run's.")
    ] = "",
    dtype: opt.RunDtype = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.AsJson = False,
) -> None:
    """Decode the same prompts with drafts, by the target alone and by transformers, and compare.

    Tokens per second of whole calls, beside transformers' generate, prompt lookup and, with
    --assistant, assisted generation. Texts are compared with those of the target alone.
    """
    quiet_libraries()
    from fledge.bench import decode as bench_ways
    from fledge.decode.stops import Stops, eos_token_ids
    from fledge.decode.strategies.registry import check_name
    from fledge.measure.evaluation import check_fits
    from fledge.measure.prompts import read_prompts
    from fledge.train.loading import with_layers_of
    from fledge.train.runs import draft_directory, trained_tokens

    for name in method or ():
        check_name(name)
    rows = read_prompts(prompts or ["mixed"], limit=limit or None)
    paths = dict(zip(shortest_names(drafts), map(draft_directory, drafts), strict=True))
    first = next(iter(paths.values()))
    named = (target, aux_layers, dtype, device, trust_remote_code)
    with load_target(first, *named) as backend:
        tokenizer, model = backend.tokenizer, backend.model
        ids = _encoded(rows, backend, max_new_tokens)
        stops = Stops(max_new_tokens, eos_token_ids(model, tokenizer))
        counts = {name: draft_tokens or trained_tokens(path) for name, path in paths.items()}
        ways = bench_ways.draftless_ways(
            model, stops, pad_id=getattr(tokenizer, "pad_token_id", None) or 0,
            num_draft_tokens=max(counts.values()),
            assistant=_load_assistant(assistant, backend) if assistant else None,
        )  # fmt: skip
        for name, path in paths.items():
            reading = backend if aux_layers else with_layers_of(backend, path)
            draft = load_draft_beside(reading, path)
            check_fits(reading, draft, name)
            ways |= bench_ways.draft_ways(
                reading, name, draft, stops, num_draft_tokens=counts[name], methods=method or ()
            )
        figures = []
        for size in batch or [1]:
            able = bench_ways.taking(ways, size)
            with progress_bar(f"batch {size}", "batches") as update:
                update(total=-(-len(ids) // size) * len(able))

                def on_batch(way: str, update: Any = update) -> None:
                    update(advance=1, note=way)

                decoded = bench_ways.decode_all(
                    able, ids, batch=size, device=model.device, on_batch=on_batch
                )
            figures += [result.to_json(decoded) for result in decoded.values()]
    if as_json:
        print_json(figures)
    else:
        _show(figures)


def _encoded(prompts: Any, target: Any, max_new_tokens: int) -> list[list[int]]:
    """The tokens of the prompts that leave room for an answer."""
    from fledge.data.template import ChatTemplate
    from fledge.measure.prompts import encode_prompt
    from fledge.target.layers import longest_text

    if target.tokenizer is None:
        raise BadInput("the target has no tokenizer", fix="prompts are texts: give it one")
    template, room = ChatTemplate.of(target.tokenizer), longest_text(target.model.config)
    encoded = [
        encode_prompt(list(prompt.messages), template, target.tokenizer) for prompt in prompts
    ]
    fitting = [ids for ids in encoded if len(ids) + max_new_tokens <= room]
    if not fitting:
        raise BadInput("no prompt leaves room for an answer", fix="lower --max-new-tokens")
    return fitting


def _load_assistant(name: str, target: Any) -> Any:
    from fledge.models.resolve import load_model

    weight = target.get_input_embeddings().weight
    model = load_model(name, dtype=weight.dtype, device=weight.device)
    if model.config.vocab_size != len(weight):
        what = f"it has {model.config.vocab_size} tokens, the target {len(weight)}"
        raise BadInput(what, where=f"--assistant {name}", fix="name a model of the same family")
    return model


def _show(figures: Sequence[Mapping[str, Any]]) -> None:
    for batch in dict.fromkeys(row["batch"] for row in figures):
        shown = plain_table(
            "way", "tokens/s", "passes/s", "tokens\na round", "against\nplain",
            "against\ngenerate", "texts\nas plain", no_wrap=True, title=f"batch {batch}",
        )  # fmt: skip
        shown.columns[0].no_wrap, shown.columns[0].overflow = False, "fold"
        for row in figures:
            if row["batch"] == batch:
                shown.add_row(*_cells(row))
        out.print(shown)
    note = "Whole calls, the passes over the prompts included; plain: fledge without a draft."
    out.print(note, style="dim")


def _cells(row: Mapping[str, Any]) -> list[str]:
    length, ratios = row["tokens_per_round"], ("against_plain", "against_transformers")
    return [
        row["way"],
        f"{row['tokens_per_s']:,.1f}",
        f"{row['passes_per_s']:,.1f}",
        "" if length is None else f"{length:.2f}",
        *("" if row[name] is None else f"{row[name]:.2f}x" for name in ratios),
        f"{row['texts_as_plain']} of {row['texts']}",
    ]
