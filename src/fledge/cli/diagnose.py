"""`fledge diagnose`: why a draft's acceptance is too low, with evidence and certain repairs."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from fledge.cli import options as opt
from fledge.cli.console import err, out, print_json, progress_bar, quiet_libraries
from fledge.cli.loading import parse_dtype
from fledge.core.errors import BadInput
from fledge.core.files import check_place
from fledge.core.machine import find_device
from fledge.core.terminal import counted

EXAMPLE = (
    "Example: fledge diagnose runs/my_draft\n\n"
    "Example: fledge diagnose downloaded/eagle3-draft --target smollm2-135m --fix repaired"
)
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def diagnose(
    draft: Annotated[
        str, Argument(metavar="DRAFT", help="A directory or hub id, anybody's; or a run.")
    ],
    target: opt.TargetOption = "",
    fix: Annotated[
        Path | None, Option(metavar="OUT", help="Write a copy with the certain repairs.")
    ] = None,
    static: Annotated[
        bool, Option("--static", help="Only checks that need no weights of the target.")
    ] = False,
    engine: Annotated[
        str, Option(help="vllm or sglang: what it cannot load becomes an error.")
    ] = "",
    prompts: Annotated[int, Option(min=1, help="Prompts to decode, of 32 shipped.")] = 16,
    max_new_tokens: Annotated[int, Option(min=4, help="Length limit of answers.")] = 64,
    dtype: Annotated[str, Option(help="The target's: float32, ...; auto: as stored.")] = "",
    device: opt.DeviceOption = "",
    trust_remote_code: opt.TrustRemoteCode = False,
    as_json: opt.AsJson = False,
) -> None:
    """Check an EAGLE, P-EAGLE or block draft of any trainer against its target.

    Files first, then the two tables of the target, then decoding: settings that could be wrong are
    tried both ways on the target's own answers. The exit code is 1 when an error is left: without
    --fix any error, with it those that have no certain repair.
    """
    from fledge.formats.checks.probe import Answering
    from fledge.formats.diagnose import diagnose as examine
    from fledge.formats.diagnose import write_repaired

    quiet_libraries()
    if fix is not None:
        if fix.exists():
            raise BadInput("exists already", where=str(fix), fix="name a new directory for --fix")
        check_place(fix, directory=True)
    chosen, where = parse_dtype(dtype or "auto"), find_device(device)
    directory, name = _locate(draft, target)
    with progress_bar() as watch:
        answering = partial(
            Answering, prompts=prompts, max_new_tokens=max_new_tokens, dtype=chosen,
            device=str(where), watch=watch,
        )  # fmt: skip
        watch("checking the files", 0, 1)
        options: dict[str, Any] = {
            "engine": engine, "static": static, "answering": answering,
            "trust_remote_code": trust_remote_code,
        }  # fmt: skip
        diagnosis = examine(directory, name, **options)
        after = None
        if fix is not None and diagnosis.repaired is not None:
            after = examine(write_repaired(diagnosis, fix), name, **options)
    last = after or diagnosis
    if as_json:
        print_json({**diagnosis.to_json(), "repaired": None if after is None else after.to_json()})
    else:
        _show(diagnosis)
        if fix is not None:
            _show_repair(diagnosis, after, fix)
    if last.of("error"):
        raise Exit(1)


def _locate(draft: str, target: str) -> tuple[Path, str]:
    """The draft's directory and the target's name, by default the target of its run."""
    from fledge.models.resolve import local_model
    from fledge.models.shipped import shipped_drafts
    from fledge.target.kinds import model_name
    from fledge.training.runs import draft_directory, recipe_of

    path = Path(draft).expanduser()
    ours = path.is_dir() or draft in shipped_drafts()
    directory = draft_directory(path) if ours else local_model(draft)
    recipe = None if target else recipe_of(directory)
    name = target or ("" if recipe is None else model_name(recipe.target))
    if not name:
        raise BadInput("which target?", where=draft, fix="give --target MODEL")
    return directory, name


def _show(diagnosis: Any) -> None:
    files = diagnosis.files
    out.say(
        f"{files.directory}: {diagnosis.layout} layout, {counted(len(files.tensors), 'tensor')}, "
        f"for {diagnosis.target}"
    )
    for finding in diagnosis.findings:
        out.print(f"{finding.severity:>7}  ", style=_STYLES[finding.severity], end="")
        out.print(finding.check, style="bold", end="")
        out.say(f"  {finding.evidence}")
        if finding.fix:
            hint = " (--fix does it)" if finding.repair is not None else ""
            out.say(f"         {'':{len(finding.check)}}  -> {finding.fix}{hint}")
    for reason in diagnosis.skipped:
        out.say(f"skipped  {reason}", style="yellow")
    errors, warnings = len(diagnosis.of("error")), len(diagnosis.of("warning"))
    if diagnosis.healthy:
        out.print("healthy", style="bold green")
    else:
        out.print(f"{counted(errors, 'error')}, {counted(warnings, 'warning')}", style="bold")


def _show_repair(diagnosis: Any, after: Any, path: Path) -> None:
    if after is None:
        err.say("nothing was written: no fault has a certain repair")
        return
    repaired = [finding.check for finding in diagnosis.findings if finding.repair is not None]
    out.say(f"\nrepaired copy in {path} ({', '.join(repaired)}), checked again:")
    _show(after)
