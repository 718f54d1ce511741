"""The command that serves a draft, for each engine."""

import json
from collections.abc import Mapping
from typing import Any

from fledge.methods.base import Method
from fledge.methods.registry import METHODS, method_that_drafts

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
    num_draft_tokens: int | None = None,
    host: str | None = None,
    port: int | None = None,
) -> list[str]:
    """`record` is an export's own (fledge_export.json); k defaults to what it was trained for."""
    depth = num_draft_tokens or record["num_draft_tokens"]
    method = method_of_record(record)
    where = [] if host is None else ["--host", host]
    where += [] if port is None else ["--port", str(port)]
    if record["engine"] == "sglang":
        return [
            "python", "-m", "sglang.launch_server", "--model-path", target,
            "--speculative-algorithm", method.algorithms["sglang"],
            "--speculative-draft-model-path", directory,
            "--speculative-num-steps", str(depth), *method.sglang_flags(depth), *where,
        ]  # fmt: skip
    as_recorded = num_draft_tokens is None and target == record["target"]["served_as"]
    if record["engine"] == "speculators" and as_recorded:
        return ["vllm", "serve", directory, *where]  # target, method and k are in the file
    speculative: dict[str, Any] = {
        "method": method.algorithms["vllm"],
        "model": directory,
        "num_speculative_tokens": depth,
        **method.vllm_settings,
    }
    return ["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *where]
