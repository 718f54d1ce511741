"""`fledge serve`: the command that serves an export; with `--run` it is started."""

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import out, print_json
from fledge.cli.options import TrainedTokens, TrustRemoteCode
from fledge.core.errors import BadInput

EXAMPLE = (
    "Example: fledge serve runs/my_draft/exports/vllm\n\n"
    "Example: fledge serve runs/my_draft/exports/sglang --run --port 30000 -- --dtype bfloat16"
)


def serve(
    draft: Annotated[Path, Argument(metavar="DRAFT", help="An export of `fledge export`.")],
    more: Annotated[
        list[str] | None,
        Argument(metavar="[-- FLAGS...]", help="Handed to the engine.", show_default=False),
    ] = None,
    target: Annotated[str, Option(help="The target; default: what the export names.")] = "",
    draft_tokens: TrainedTokens = 0,
    trust_remote_code: TrustRemoteCode = False,
    host: Annotated[str, Option(help="Address to listen on; default: the engine's.")] = "",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: the engine's default.")] = 0,
    run: Annotated[bool, Option("--run", help="Start the engine.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the words as JSON.")] = False,
) -> None:
    """Print the engine's command for a draft: its flags decide whether the draft works at all.

    A wrong method, or P-EAGLE without parallel drafting, gives acceptance 1.0 without a warning.
    """
    from fledge.export.commands import ENGINE_MODULES, serve_command
    from fledge.export.export import read_export_record
    from fledge.export.here import target_here

    record = read_export_record(draft)
    name = target or target_here(draft, record)
    if not name:
        called = record["target"]["name"]
        what = f"where its target {called} lies is not known here" if called else "no target named"
        raise BadInput(what, where=str(draft), fix="give --target MODEL")
    command = serve_command(
        record, str(draft.resolve()), target=_absolute(name), host=host or None,
        port=port or None, num_draft_tokens=draft_tokens or None,
    )  # fmt: skip
    command += [*(["--trust-remote-code"] if trust_remote_code else []), *(more or [])]
    if not run:
        print_json(command) if as_json else out.plain(shlex.join(command))
        return
    module = ENGINE_MODULES[record["engine"]]
    if importlib.util.find_spec(module) is None:
        fix = f"pip install {module}, or run the printed command where it is"
        raise BadInput(f"{module} is not installed here", fix=fix)
    words = _with_programs_here(command)
    os.execv(words[0], words)


def _absolute(name: str) -> str:
    """A directory as the engine finds it from anywhere; a hub id as it stands."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _with_programs_here(command: list[str]) -> list[str]:
    """The same with the program as a path: beside this Python first, then wherever it is."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise BadInput(f"no program '{command[0]}' on this machine")
    return [program, *command[1:]]
