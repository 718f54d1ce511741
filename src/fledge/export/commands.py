"""The command that serves a draft, for each engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.methods.base import Method
from fledge.methods.registry import METHODS, method_that_drafts
from fledge.models.resolve import public_name

ENGINE_MODULES = {"vllm": "vllm", "sglang": "sglang", "speculators": "vllm"}


def method_of_record(record: Mapping[str, Any]) -> Method:
    """The method of an export's draft; older records name only its drafting strategy."""
    name = record.get("objective")
    return method_that_drafts(record["method"]) if name is None else METHODS[name]


def serve_command(
    record: Mapping[str, Any],
    directory: str,
    *,
    target: str,
    named: str | None = None,
    num_draft_tokens: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> list[str]:
    """The command that serves an export, given its record (fledge_export.json).

    The number of draft tokens defaults to that of training. `target` is what the engine loads,
    `named` its public name, if it is not the record's target.
    """
    depth = num_draft_tokens or record["num_draft_tokens"]
    method = method_of_record(record)
    recorded = record["target"]
    own_name = recorded["name"] if target == recorded["served_as"] else target
    flags = _identity_flags(named or own_name, recorded.get("dtype", ""))
    flags += [] if host is None else ["--host", host]
    flags += [] if port is None else ["--port", str(port)]
    if record["engine"] == "sglang":
        return [
            "python", "-m", "sglang.launch_server", "--model-path", target,
            "--speculative-algorithm", method.algorithms["sglang"],
            "--speculative-draft-model-path", directory,
            *method.sglang_flags(depth), *flags,
        ]  # fmt: skip
    as_recorded = num_draft_tokens is None and target == recorded["served_as"]
    if record["engine"] == "speculators" and as_recorded:
        return ["vllm", "serve", directory, *flags]  # target, method and k are in the file
    speculative: dict[str, Any] = {
        "method": method.algorithms["vllm"],
        "model": directory,
        "num_speculative_tokens": depth,
        **method.vllm_settings,
    }
    return ["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *flags]


def _identity_flags(name: str, dtype: str) -> list[str]:
    """Flags for what an engine would otherwise choose itself: the precision (float32 silently
    becomes 16 bits), and the name that clients and manifests use (a path on the server's disk)."""
    flags = ["--dtype", dtype] if dtype else []
    public = public_name(name).partition("@")[0]
    return [*flags, "--served-model-name", public] if name else flags


def without_repeats(command: Sequence[str], given: Sequence[str]) -> list[str]:
    """The command with the user's flags appended, without those of ours that they override."""
    overridden = {argument.partition("=")[0] for argument in given if argument.startswith("--")}
    kept, arguments = [], iter(command)
    for argument in arguments:
        if argument in overridden:  # every flag of ours that users may override has a value
            next(arguments)
        else:
            kept.append(argument)
    return [*kept, *given]
