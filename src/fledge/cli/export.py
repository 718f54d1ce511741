"""`fledge export`: write a draft as files that an engine serves, checked before they appear."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fledge.cli import options as opt
from fledge.cli.console import out, plain_table, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import parse_dtype
from fledge.core.terminal import counted

EXAMPLE = (
    "Example: fledge export runs/my_draft --engine vllm\n\n"
    "Example: fledge export runs/my_draft --engine sglang --engine-version 0.5.9 --out served"
)


def export(
    source: Annotated[
        Path, Argument(metavar="RUN_OR_CHECKPOINT", help="A run (its best), or a draft.")
    ],
    engine: Annotated[str, Option(help="vllm, sglang, llama.cpp or speculators (the format).")],
    engine_version: Annotated[
        str, Option(help="For example 0.5.9; default: the newest tested one.")
    ] = "",
    target: opt.TargetOption = "",
    target_name: Annotated[
        str, Option(help="What card and config call it; default: its public name.")
    ] = "",
    destination: Annotated[
        Path | None, Option(*opt.OUT, help="Directory; default: exports/ENGINE in the run.")
    ] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an export.")] = False,
    dtype: Annotated[str, Option(help="bfloat16, ...; default: as stored.")] = "",
    quantise: Annotated[
        str, Option(help="For llama.cpp: q8_0, q4_k_m, or auto: as small as costs 1 %.")
    ] = "",
    draft_tokens: opt.TrainedTokens = 0,
    without_target: Annotated[
        bool, Option("--without-target", help="Check the files, decode nothing.")
    ] = False,
    prompts: Annotated[
        list[str] | None,
        Option(help="Prompts to decode: JSONL or `mixed`; default: the run's held-out rows."),
    ] = None,
    limit: Annotated[int, Option(min=1, help="Prompts to decode.")] = 8,
    max_new_tokens: Annotated[int, Option(min=2, help="Length limit of answers.")] = 64,
    shortfall: Annotated[
        float, Option(min=0, max=1, help="Share of the estimated gain that decoding may miss.")
    ] = 0.5,
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: Annotated[bool, Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Write a draft as an engine reads it, and prove that the files do what training measured.

    Before the directory gets its name the files are read back the way the engine reads them,
    compared tensor by tensor, measured on the run's held-out rows and decoded with beside the
    checkpoint. A failed check leaves nothing behind.
    """
    from fledge.formats.export import export_draft, read_export_record
    from fledge.formats.self_check import CheckOptions
    from fledge.formats.source import default_out

    quiet_libraries()
    check = CheckOptions(tuple(prompts or ()), limit, max_new_tokens, shortfall)
    with progress_bar() as watch:
        written = export_draft(
            source, destination or default_out(source, engine), engine=engine, target=target,
            engine_version=engine_version or None, num_draft_tokens=draft_tokens or None,
            dtype=parse_dtype(dtype, floating=True) if dtype else None, device=device or None,
            without_target=without_target, check=check, watch=watch,
            trust_remote_code=trust_remote_code, target_name=target_name, overwrite=overwrite,
            quantise=quantise,
        )  # fmt: skip
    record = read_export_record(written)
    if as_json:
        print_json({"out": str(written), **record})
    else:
        _show(written, record, target)


def _show(written: Path, record: dict[str, Any], target: str) -> None:
    import shlex

    from fledge.formats.card import acceptance_rows
    from fledge.formats.engines import serve_command
    from fledge.formats.source import name_for_engines, target_here

    check = record["self_check"]
    out.say(
        f"{written}: {record['kind']} for {record['engine_title']} {record['engine_version']} "
        f"({record['format']}, {record['dtype']}); {counted(check['tensors'], 'tensor')} read "
        "back, bit for bit"
    )
    lengths = plain_table("acceptance length", "")
    for what, length in acceptance_rows(check):
        lengths.add_row(what, f"{length:.3f}")
    if lengths.row_count:
        out.print(lengths)
    if (record["quantised"] or {}).get("each"):
        out.print(_costs(record["quantised"]))
    for note in check["notes"]:
        out.say(note, style="yellow")
    here = name_for_engines(target) if target else target_here(written, record) or "TARGET"
    named = record["target"]["name"] or None
    command = serve_command(record, str(written.absolute()), target=here, named=named)
    out.say(f"serve it: {shlex.join(command)}")


def _costs(quantised: dict[str, Any]) -> Any:
    """What quantising costs on the run's held-out rows, in all and tensor by tensor."""
    table = plain_table("quantised", "type", "length")
    table.add_row("nothing", "", f"{quantised['full_length']:.3f}")
    for name, length in quantised["each"].items():
        table.add_row(f"{name} alone", quantised["types"][name], f"{length:.3f}")
    table.add_row("as written", "", f"{quantised['length']:.3f}")
    return table
