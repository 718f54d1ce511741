"""The command that serves a draft, for each engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fledge.methods.base import Method
from fledge.methods.registry import METHODS, method_that_drafts
from fledge.models.resolve import public_name

ENGINE_MODULES = {"vllm": "vllm", "sglang": "sglang", "speculators": "vllm"}


def method_of_record(record: Mapping[str, Any]) -> Method:
    """The method of an export's draft; older records name its way of drafting alone."""
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
    """`record` is an export's own (fledge_export.json); k defaults to what it was trained for.

    `target` is what the engine loads, `named` what a person calls it, where it is another one than
    the record's.
    """
    depth = num_draft_tokens or record["num_draft_tokens"]
    method = method_of_record(record)
    known = record["target"]
    own_name = known["name"] if target == known["served_as"] else target
    where = _identity(named or own_name, known.get("dtype", ""))
    where += [] if host is None else ["--host", host]
    where += [] if port is None else ["--port", str(port)]
    if record["engine"] == "sglang":
        return [
            "python", "-m", "sglang.launch_server", "--model-path", target,
            "--speculative-algorithm", method.algorithms["sglang"],
            "--speculative-draft-model-path", directory,
            *method.sglang_flags(depth), *where,
        ]  # fmt: skip
    as_recorded = num_draft_tokens is None and target == known["served_as"]
    if record["engine"] == "speculators" and as_recorded:
        return ["vllm", "serve", directory, *where]  # target, method and k are in the file
    speculative: dict[str, Any] = {
        "method": method.algorithms["vllm"],
        "model": directory,
        "num_speculative_tokens": depth,
        **method.vllm_settings,
    }
    return ["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *where]


def _identity(name: str, dtype: str) -> list[str]:
    """What an engine would otherwise choose by itself: the precision (float32 silently becomes 16
    bits), and the name that clients see and manifests keep (a path on the server's disk)."""
    flags = ["--dtype", dtype] if dtype else []
    public = public_name(name).partition("@")[0]
    return [*flags, "--served-model-name", public] if name else flags


def without_repeats(command: Sequence[str], given: Sequence[str]) -> list[str]:
    """The command and the user's own flags behind it; what these say is not said before."""
    theirs = {word.partition("=")[0] for word in given if word.startswith("--")}
    kept, words = [], iter(command)
    for word in words:
        if word in theirs:  # every flag of ours that users may give has a value
            next(words)
        else:
            kept.append(word)
    return [*kept, *given]
