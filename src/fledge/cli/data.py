"""`fledge data prepare | preview | stats`: prepare and inspect the data before training on it."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fledge.cli.console import err, facts_table, html_page, in_color, out, print_json, progress_bar
from fledge.cli.help import Verbs
from fledge.cli.options import AsJson, TrustRemoteCode
from fledge.core.errors import BadInput, nearest
from fledge.core.terminal import MARKS, counted, marked

app = Verbs(
    help="Prepare conversations for training, and look at them.",
    epilog="Example: fledge data preview chats.jsonl --model smollm2-135m",
)

Sources = Annotated[
    list[str],
    Argument(
        metavar="DATA",
        help="Files (.jsonl, .json, .parquet), directories, addresses of them (s3://, hf://, "
        "https://), or data set ids such as 'org/name' or 'org/name:train[:1000]'.",
        show_default=False,
    ),
]
Model = Annotated[
    str,
    Option(
        "--model", "-m", help="Model of the tokenizer and chat template: directory, hub id or name."
    ),
]
MaxLength = Annotated[
    int | None, Option(min=2, help="Longest row in tokens; longer ones are cut or dropped.")
]
OverlongRows = Annotated[str, Option("--overlong", help="cut | drop rows over --max-length.")]
LastTurn = Annotated[bool, Option("--last-turn-only", help="Supervise the last answer only.")]
MaskReasoning = Annotated[
    bool, Option("--mask-reasoning", help="Do not supervise reasoning (<think> and similar).")
]
TemplateOptions = Annotated[
    list[str] | None,
    Option("--template-option", help="Template variable, e.g. enable_thinking=false."),
]
Workers = Annotated[int | None, Option(min=1, help="Processes; default: one per core.")]
MaxDrop = Annotated[
    float, Option("--max-drop-share", min=0, max=1, help="Largest share of bad rows allowed.")
]


def _options(
    max_length: int | None, overlong: str, last: bool, reasoning: bool, pairs: list[str] | None
) -> Any:
    """The `TokeniseOptions` of the flags that all three verbs have."""
    from fledge.data.tokenise import TokeniseOptions

    if overlong not in ("cut", "drop"):
        hint = nearest(overlong, ["cut", "drop"])
        raise BadInput(f"--overlong is cut or drop, not {overlong!r}", fix=hint)
    variables = template_variables(pairs)
    return TokeniseOptions(max_length, overlong, last, reasoning, variables)  # type: ignore[arg-type]


def template_variables(pairs: list[str] | None) -> dict[str, Any]:
    """The values of --template-option, which are YAML."""
    import yaml

    variables = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise BadInput(f"{pair!r} is not NAME=VALUE", where="--template-option")
        try:
            variables[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise BadInput(f"{value!r} is not YAML", where="--template-option") from None
    return variables


def _prepare(data: list[str], directory: Path, options: Any, **more: Any) -> Any:
    from fledge.data.prepare import prepare_rows

    with progress_bar("preparing data") as progress:
        return prepare_rows(data, directory, options, on_progress=progress, **more)


@app.command(
    epilog="Example: fledge data prepare chats.jsonl --model smollm2-135m --max-length 4096"
)
def prepare(
    data: Sources,
    model: Model = "smollm2-135m",
    max_length: MaxLength = None,
    overlong: OverlongRows = "cut",
    last_turn_only: LastTurn = False,
    mask_reasoning: MaskReasoning = False,
    template_option: TemplateOptions = None,
    trust_remote_code: TrustRemoteCode = False,
    workers: Workers = None,
    max_drop_share: MaxDrop = 0.05,
    as_json: AsJson = False,
) -> None:
    """Tokenise conversations once; a later run with the same data and options starts at once."""
    from fledge.data.preview import row_figures
    from fledge.models.resolve import local_model

    options = _options(max_length, overlong, last_turn_only, mask_reasoning, template_option)
    rows = _prepare(
        data, local_model(model, weights=False), options, workers=workers,
        max_drop_share=max_drop_share, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    figures = row_figures(rows)
    if as_json:
        print_json({"directory": str(rows.directory), "fingerprint": rows.fingerprint, **figures})
        return
    again = f" ({figures['repeated']:,} repeated)" if figures["repeated"] else ""
    template = "[bold]{}[/]{}, [bold]{}[/], [green]{:.1%} supervised[/], {} without an end"
    tokens, share = counted(rows.tokens, "token"), rows.supervised / rows.tokens
    ends = counted(rows.truncated, "answer")
    out.print(marked(template, counted(len(rows), "row"), again, tokens, share, ends))
    out.say(rows.drops.line(most=None) or "no row dropped")
    out.say(f"kept in {rows.directory}", style="dim")


@app.command(epilog="Example: fledge data preview chats.jsonl -n 3 --html preview.html")
def preview(
    data: Sources,
    model: Model = "smollm2-135m",
    count: Annotated[int, Option("--count", "-n", min=1, help="Conversations to show.")] = 3,
    html: Annotated[Path | None, Option(help="Write a page instead of printing.")] = None,
    max_length: MaxLength = None,
    overlong: OverlongRows = "cut",
    last_turn_only: LastTurn = False,
    mask_reasoning: MaskReasoning = False,
    template_option: TemplateOptions = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Show which tokens are supervised, and which rows would be dropped and why.

    In color on a terminal; elsewhere, supervised text is enclosed in marks.
    """
    from fledge.core.files import check_place, write_text
    from fledge.data import preview as view
    from fledge.data.tokenise import Encoder
    from fledge.models.resolve import local_model

    options = _options(max_length, overlong, last_turn_only, mask_reasoning, template_option)
    if html is not None:
        check_place(html, read=data)
    directory = local_model(model, weights=False)
    encoder = Encoder.load(directory, options, trust_remote_code=trust_remote_code)
    rows = list(view.preview_rows(data, encoder, count))
    if html is not None:
        write_text(html, html_page(view.to_terminal(row) for row in rows))
        err.say(f"wrote {html}")
    if as_json:
        print_json([row.to_json() for row in rows])
    elif html is None:
        colors = in_color()
        for row in rows:
            out.print(view.to_terminal(row, colors=colors))
            out.print()
        legend = "[black on pale_green1]green[/] tokens are" if colors else "what is in {} is"
        text = "template of {}; " + legend + " supervised"
        out.print(marked(text, *([model] if colors else [model, MARKS])), style="dim")


@app.command(epilog="Example: fledge data stats chats.jsonl --pack 4096 --json")
def stats(
    data: Sources,
    model: Model = "smollm2-135m",
    pack: Annotated[int, Option(min=2, help="Tokens per pack, for the padding share.")] = 4096,
    max_length: MaxLength = None,
    overlong: OverlongRows = "cut",
    last_turn_only: LastTurn = False,
    mask_reasoning: MaskReasoning = False,
    template_option: TemplateOptions = None,
    trust_remote_code: TrustRemoteCode = False,
    workers: Workers = None,
    max_drop_share: MaxDrop = 1.0,
    as_json: AsJson = False,
) -> None:
    """Lengths, supervised share, padding after packing, drop reasons, vocabulary coverage."""
    from fledge.data.preview import data_stats
    from fledge.models.resolve import load_config, local_model

    directory = local_model(model, weights=False)
    options = _options(max_length, overlong, last_turn_only, mask_reasoning, template_option)
    rows = _prepare(
        data, directory, options, workers=workers, max_drop_share=max_drop_share,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    config = load_config(str(directory), trust_remote_code=trust_remote_code)
    vocab_size = int(getattr(config, "text_config", config).vocab_size)
    figures = data_stats(rows, vocab_size, pack)
    if as_json:
        print_json(figures)
    else:
        _print_stats(figures)
        out.say(rows.drops.line(most=None) or "no row dropped")


def _print_stats(figures: dict[str, Any]) -> None:
    packing = f"{counted(figures['packs'], 'pack')} of {figures['pack_tokens']:,}, "
    packing += f"{figures['padding_share']:.2%} padding"
    packing += f", {counted(figures['overlong'], 'row')} cut" if figures["overlong"] else ""
    facts = {
        "rows": f"{figures['rows']:,}",
        "repeated rows": f"{figures['repeated']:,}",
        "tokens": f"{figures['tokens']:,}",
        "supervised": f"{figures['supervised']:,} ({figures['supervised_share']:.1%})",
        "answers without their end": f"{figures['truncated']:,}",
        "length": "  ".join(f"{name} {value:,}" for name, value in figures["lengths"].items()),
        "packing": packing,
        "distinct supervised tokens": f"{figures['distinct']:,}",
        "draft vocabulary covers": "  ".join(
            f"{n:,} {part:.2%}" for n, part in figures["coverage"]
        ),
    }
    out.print(facts_table(facts))
