"""`fledge diagnose`: why a draft accepts less than it should, with evidence and certain repairs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fledge.cli.console import err, out, print_json, quiet_libraries, watching
from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.core.machine import find_device

EXAMPLE = (
    "Example: fledge diagnose runs/my_draft\n\n"
    "Example: fledge diagnose downloaded/eagle3-draft --target smollm2-135m --fix repaired"
)
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def diagnose(
    draft: Annotated[
        str, typer.Argument(metavar="DRAFT", help="A directory or hub id, anybody's; or a run.")
    ],
    target: Annotated[str, typer.Option(help="The target; a run of fledge knows its own.")] = "",
    fix: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a copy with the certain repairs.")
    ] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Only checks that need no weights of the target.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="vllm or sglang: what it cannot load becomes an error.")
    ] = "",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts to decode, of 32 shipped.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=4, help="Length limit of answers.")] = 64,
    dtype: Annotated[str, typer.Option(help="The target's: float32, ...; auto: as stored.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: a GPU if any.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check an EAGLE-3 or P-EAGLE draft of any trainer against its target.

    Files first, then the two tables of the target, then decoding: settings that could be wrong are
    tried both ways on the target's own answers. The exit code is 1 when an error is left: without
    --fix any error, with it those that have no certain repair.
    """
    from fledge.diagnosis.checks.probe import Answering
    from fledge.diagnosis.diagnose import diagnose as examine
    from fledge.diagnosis.diagnose import write_repaired

    quiet_libraries()
    if fix is not None and fix.exists():
        raise BadInput("exists already", where=str(fix), fix="name a new directory for --fix")
    if fix is not None:
        check_place(fix, directory=True)
    chosen, where = _dtype(dtype), find_device(device)
    directory, name = _places(draft, target)
    with watching() as watch:

        def answering(facts: Any) -> Answering:
            return Answering(
                facts,
                prompts=prompts,
                max_new_tokens=max_new_tokens,
                dtype=chosen,
                device=str(where),
                watch=watch,
            )

        watch("checking the files", 0, 1)
        options: dict[str, Any] = {"engine": engine, "static": static, "answering": answering}
        diagnosis = examine(directory, name, **options)
        after = None
        if fix is not None and diagnosis.repaired is not None:
            after = examine(write_repaired(diagnosis, fix), name, **options)
    last = after or diagnosis
    if as_json:
        print_json(
            {**diagnosis.to_json(), "repaired": None if after is None else after.to_json()},
        )
    else:
        _show(diagnosis)
        if fix is not None:
            _show_repair(diagnosis, after, fix)
    if last.of("error"):
        raise typer.Exit(1)


def _places(draft: str, target: str) -> tuple[Path, str]:
    """The draft's directory and the target's name; a run knows its own target."""
    from fledge.models.resolve import local_model
    from fledge.target.kinds import model_name
    from fledge.train.runs import draft_directory, recipe_of

    path = Path(draft).expanduser()
    directory = draft_directory(path) if path.is_dir() else local_model(draft)
    recipe = None if target else recipe_of(directory)
    name = target or ("" if recipe is None else model_name(recipe.target))
    if not name:
        raise BadInput("which target?", where=draft, fix="give --target MODEL")
    return directory, name


def _dtype(name: str) -> Any:
    import torch

    if name in ("", "auto"):
        return "auto"
    named = getattr(torch, name, None)
    if not isinstance(named, torch.dtype):
        raise BadInput(f"'{name}' is not a dtype", where="--dtype", fix="for example bfloat16")
    return named


def _show(found: Any) -> None:
    out.print(
        f"{found.files.directory}: {found.layout} layout, {len(found.files.tensors)} tensors, for "
        f"{found.target}",
        soft_wrap=True,
        markup=False,
    )
    for finding in found.findings:
        out.print(f"{finding.severity:>7}  ", style=_STYLES[finding.severity], end="")
        out.print(finding.check, style="bold", end="")
        out.print(f"  {finding.evidence}", soft_wrap=True, markup=False)
        if finding.fix:
            sure = " (--fix does it)" if finding.repair is not None else ""
            out.print(f"         {'':{len(finding.check)}}  -> {finding.fix}{sure}", soft_wrap=True,
                      markup=False)  # fmt: skip
    for reason in found.skipped:
        out.print(f"skipped  {reason}", style="yellow", soft_wrap=True, markup=False)
    errors, warnings = len(found.of("error")), len(found.of("warning"))
    verdict = "healthy" if found.healthy else f"{errors} errors, {warnings} warnings"
    out.print(verdict, style="bold green" if found.healthy else "bold")


def _show_repair(diagnosis: Any, after: Any, path: Path) -> None:
    if after is None:
        err.print("nothing was written: no fault has a certain repair", soft_wrap=True)
        return
    done = [finding.check for finding in diagnosis.findings if finding.repair is not None]
    out.print(f"\nrepaired copy in {path} ({', '.join(done)}), checked again:", soft_wrap=True)
    _show(after)
