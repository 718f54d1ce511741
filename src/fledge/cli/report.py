"""`fledge report`: a run as one self-contained HTML page."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fledge.cli.console import err, out, print_json
from fledge.cli.options import OUT, TrustRemoteCode
from fledge.core.errors import BadInput
from fledge.core.files import check_place, write_json, write_text
from fledge.core.terminal import counted

EXAMPLE = "Example: fledge report runs/my_draft --measure"


def report(
    run: Annotated[Path, Argument(metavar="RUN", help="The directory of a run.")],
    output: Annotated[Path | None, Option(*OUT, help="The page; default: RUN/report.html.")] = None,
    evaluation: Annotated[
        Path | None, Option("--eval", help="Figures to show; default: RUN/eval.json if any.")
    ] = None,
    measure: Annotated[
        bool, Option(help="Evaluate the run's best draft first, into RUN/eval.json.")
    ] = False,
    target: Annotated[str, Option(help="For --measure: instead of the run's own.")] = "",
    prompts: Annotated[
        list[str] | None, Option(help="For --measure, as in `fledge eval`; default: mixed.")
    ] = None,
    limit: Annotated[int, Option(min=0, help="For --measure: prompts per file.")] = 0,
    live: Annotated[
        int, Option(min=0, help="For --measure: answers to decode live too; 0: none, no clock.")
    ] = 4,
    max_new_tokens: Annotated[
        int, Option(min=2, help="For --measure: length limit of answers.")
    ] = 256,
    draft_tokens: Annotated[
        int, Option(min=0, help="For --measure: tokens per round; 0: as many as trained.")
    ] = 0,
    samples: Annotated[int, Option(min=0, help="For --measure: answers shown.")] = 6,
    device: Annotated[str, Option(help="For --measure: cpu, cuda, ...")] = "",
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, Option("--json", help="Print the page's data.")] = False,
) -> None:
    """Write one self-contained HTML page: curves, acceptance, recipe, machine, tokens by writer.

    It needs no network and no server: open it from the disk, send it by mail.
    """
    from fledge.report.page import EVALUATION_NAME, gather, render

    if not run.is_dir():
        raise BadInput("no such run", where=str(run))
    path = output or run / "report.html"
    check_place(path, read=[*run.glob("*.json*"), *run.glob("*.yaml"), *filter(None, [evaluation])])
    if measure:
        if evaluation is not None:
            raise BadInput("measure, or show what was measured?", where="--eval")
        from fledge.cli import eval
        from fledge.measure.evaluation import EvalOptions

        gather(run)  # rejects a directory that is not a run before the target is loaded
        options = EvalOptions(
            draft_tokens=draft_tokens or None, limit=limit or None, max_new_tokens=max_new_tokens,
            live=live, samples=samples, device=device or None, trust_remote_code=trust_remote_code,
        )  # fmt: skip
        _announce_measuring(prompts or ["mixed"], options)
        measured = eval.measure_drafts([run], target, prompts or ["mixed"], options)
        write_json(run / EVALUATION_NAME, measured.to_json())
    data = gather(run, evaluation)
    write_text(path, render(data))
    if as_json:
        print_json({"page": str(path), **data})
    else:
        out.say(f"report: {path}")


def _announce_measuring(prompts: list[str], options: Any) -> None:
    from fledge.measure.answers import read_prompts

    count = len(read_prompts(prompts, limit=options.limit))
    err.say(
        f"measuring: the target answers {counted(count, 'prompt')} with up to "
        f"{options.max_new_tokens} tokens each (kept in the cache), the draft is replayed over "
        f"them and decodes {min(options.live, count)} live, both ways; the answers take the time: "
        "--limit, --max-new-tokens and --live make it shorter",
        style="cyan",
    )
