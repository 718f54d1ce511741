"""`fledge serve`: print the command that serves an export, or run it with `--run`."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fledge.cli.console import err, out, print_json
from fledge.cli.llamacpp import ENGINE, exported, pair_of, run_until_stopped, runs_in_llama_cpp
from fledge.cli.options import TrainedTokens, TrustRemoteCode
from fledge.core.errors import BadInput
from fledge.core.install import install_packages, is_installed, version_of
from fledge.core.machine import memory_bytes

EXAMPLE = (
    "Example: fledge serve runs/my_draft/exports/vllm\n\n"
    "Example: fledge serve runs/my_draft/exports/sglang --run --port 30000 -- --dtype bfloat16\n\n"
    "Example: fledge serve smollm2-135m-eagle3 --engine llama.cpp --run --port 8080"
)
_VLLM_SERVER = "vllm.entrypoints.openai.api_server"
_MOST_CPU_CACHE = 4 * 2**30  # of keys and values; by default vLLM takes nearly all memory
_SPACE_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")


def serve(
    draft: Annotated[
        Path,
        Argument(metavar="DRAFT", help="An export; with --engine llama.cpp, any draft or run."),
    ],
    more: Annotated[
        list[str] | None,
        Argument(metavar="[-- FLAGS...]", help="Passed to the engine.", show_default=False),
    ] = None,
    target: Annotated[str, Option(help="The target; default: what the export names.")] = "",
    engine: Annotated[
        str, Option(help="llama.cpp: export the draft for it first, unless it is.")
    ] = "",
    draft_tokens: TrainedTokens = 0,
    trust_remote_code: TrustRemoteCode = False,
    host: Annotated[str, Option(help="Address to listen on; default: the engine's.")] = "",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0: the engine's default.")] = 0,
    run: Annotated[bool, Option("--run", help="Start the engine.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the command as a JSON list.")] = False,
) -> None:
    """Print the engine's command for a draft: its flags decide whether the draft works at all.

    A wrong method, or P-EAGLE without parallel drafting, gives acceptance 1.0 without a warning.
    The command is for the engine that is installed here, or else for a usual installation.
    """
    from fledge.formats.codec import RECORD_NAME
    from fledge.formats.engines import ENGINE_MODULES, serve_command
    from fledge.formats.export import read_export_record
    from fledge.formats.source import name_for_engines, target_here

    pair, named, is_export = None, target, (draft / RECORD_NAME).is_file()
    wanted = runs_in_llama_cpp(engine)
    if wanted or (is_export and read_export_record(draft)["engine"] == ENGINE):
        place = exported(draft, target)
        pair, draft = pair_of(place, draft, target, draft_tokens), place
        name, named = str(pair.target), pair.target_name
    record = read_export_record(draft)
    if pair is None:
        name = name_for_engines(target) if target else target_here(draft, record)
    if not name:
        label = record["target"]["name"]
        what = f"where its target {label} is stored is unknown" if label else "no target named"
        raise BadInput(what, where=str(draft), fix="give --target MODEL")
    command = serve_command(
        record, str(draft.expanduser().absolute()), target=name, host=host or None,
        named=named or record["target"]["name"] or None, port=port or None,
        num_draft_tokens=draft_tokens or None,
    )  # fmt: skip
    module, extra_flags = ENGINE_MODULES[record["engine"]], more or []
    program_here = pair is not None and shutil.which(command[0]) is not None
    is_here = is_installed(module) or program_here
    if is_here and module == "vllm":
        command = _for_this_vllm(command, extra_flags)
    command += ["--trust-remote-code"] if trust_remote_code else []
    command += extra_flags  # of a flag that is given twice, engines take the last value
    has_dtype = any(word.partition("=")[0] == "--dtype" for word in command)
    if not has_dtype and pair is None:  # a GGUF file has its own
        err.say(f"no --dtype: {module} will choose one (`fledge export` records it)", "yellow")
    if not run or not is_here:
        print_json(command) if as_json else out.plain(shlex.join(command))
    if not run:
        return
    if not is_here:
        fix = f"{install_packages(module)}, or run the printed command where it is"
        raise BadInput(f"{module} is not installed here", fix=fix)
    if pair is not None and not program_here:
        if extra_flags:
            what = "needs the llama-server program, which is not here"
            raise BadInput(what, where=shlex.join(extra_flags))
        run_until_stopped(pair.serve(host=host, port=port))
        return
    argv = _with_program_path(command)
    err.say(shlex.join(argv), style="dim")
    os.execv(argv[0], argv)


def _for_this_vllm(command: list[str], extra_flags: Sequence[str]) -> list[str]:
    """Adapt the command to the vLLM of this machine."""
    import torch

    if version_of("vllm") is None:  # the `vllm` program fails without this distribution
        assert command[:2] == ["vllm", "serve"]
        command = ["python", "-m", _VLLM_SERVER, "--model", *command[2:]]
    if torch.accelerator.current_accelerator(check_available=True) is not None:
        return command
    is_set = "VLLM_CPU_KVCACHE_SPACE" in os.environ
    if is_set or any(flag.startswith(_SPACE_FLAGS) for flag in extra_flags):
        return command
    # an eighth of the memory; the rest is left to the model and to other processes
    eighth = (memory_bytes() or _MOST_CPU_CACHE * 8) // 8
    return [*command, _SPACE_FLAGS[0], str(min(_MOST_CPU_CACHE, eighth // 2**20 * 2**20))]


def _with_program_path(command: list[str]) -> list[str]:
    """Replace the program by its path: next to this Python if there, else from PATH."""
    if command[0] == "python":
        return [sys.executable, *command[1:]]
    beside = Path(sys.executable).with_name(command[0])
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise BadInput(f"no program '{command[0]}' on this machine")
    return [program, *command[1:]]
