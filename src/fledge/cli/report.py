"""`fledge report`: a run as one self-contained HTML page."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import out, print_json
from fledge.cli.options import OUT
from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_text

EXAMPLE = "Example: fledge report runs/my_draft"


def report(
    run: Annotated[Path, Argument(metavar="RUN", help="The directory of a run.")],
    output: Annotated[Path | None, Option(*OUT, help="The page; default: RUN/report.html.")] = None,
    evaluation: Annotated[
        Path | None, Option("--eval", help="Figures to show; default: RUN/eval.json if any.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print the page's data.")] = False,
) -> None:
    """Write one self-contained HTML page: curves, acceptance, recipe, machine, tokens by writer.

    It needs no network and no server: open it from the disk, send it by mail. Acceptance and tokens
    come from `fledge eval RUN --out RUN/eval.json`.
    """
    from fledge.report.page import gather, render

    if not run.is_dir():
        raise BadInput("no such run", where=str(run))
    path = output or run / "report.html"
    check_place(path, read=[*run.glob("*.json*"), *run.glob("*.yaml"), *filter(None, [evaluation])])
    data = gather(run, evaluation)
    write_text(path, render(data))
    if as_json:
        print_json({"page": str(path), **data})
    else:
        out.say(f"report: {path}")
