"""The engines that load drafts: which versions are known, what each cannot serve, and how each is
started. What they read, file by file, is in `codec`. Nothing here imports an engine.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packaging.version import Version

from fledge.core.errors import BadInput
from fledge.formats.codec import NORM_FLAGS, Feature, Format
from fledge.methods.registry import METHODS
from fledge.models.resolve import public_name

EngineName = Literal["vllm", "sglang", "speculators", "llama.cpp"]


@dataclass(frozen=True)
class Limit:
    """A feature that an engine supports only from some version on, or not at all."""

    feature: Feature
    since: str | None  # the first version known to serve it; None: no version does
    instead: str  # what would work


@dataclass(frozen=True)
class ServingEngine:
    name: EngineName
    title: str
    oldest: str  # the oldest version whose format is known
    tested: tuple[str, ...]  # oldest first
    limits: tuple[Limit, ...]
    # targets whose inner states it does not pass to drafts: EAGLE-3 cannot be served there
    mute_targets: tuple[str, ...] = ()
    for_mute_targets: str = "train objective.kind=eagle1, which needs only the last state"

    def check_target(self, architectures: list[str], *, inner_states: bool) -> None:
        """Refuse a draft that needs inner states which the engine does not pass for this target."""
        unsupported = [name for name in architectures if name in self.mute_targets]
        if inner_states and unsupported:
            raise BadInput(
                f"{self.title} does not pass the inner states of {unsupported[0]} to drafts",
                where=f"--engine {self.name}",
                fix=self.for_mute_targets,
            )

    def check_version(self, version: str | None) -> str:
        """The requested version, if it is supported; by default the newest tested one."""
        if version is None:
            return self.tested[-1]
        try:
            supported = Version(version) >= Version(self.oldest)
        except ValueError:
            what, fix = f"'{version}' is not a version", self.tested[-1]
            raise BadInput(what, where="--engine-version", fix=fix) from None
        if not supported:
            what = f"what {self.title} {version} reads is not known: {self.oldest} is the oldest"
            fix = f"tested: {', '.join(self.tested)}"
            raise BadInput(what, where="--engine-version", fix=fix)
        return version

    def refusals(self, features: frozenset[Feature], version: str) -> list[Limit]:
        """The limits of this version that a draft with these features exceeds."""
        return [
            limit
            for limit in self.limits
            if limit.feature in features
            and (limit.since is None or Version(version) < Version(limit.since))
        ]


def _norm_limits(since: str | None, instead: str) -> tuple[Limit, ...]:
    return tuple(Limit(flag, since, instead) for flag in NORM_FLAGS)


_NOT_IN_LLAMA = (
    Limit("attention bias", None, "--engine vllm"),
    Limit("mlp bias", None, "--engine vllm"),
    Limit("q/k norms", None, "train with draft.qk_norm=false, or --engine vllm"),
)
ENGINES: dict[EngineName, ServingEngine] = {
    "vllm": ServingEngine(
        "vllm", "vLLM", oldest="0.32.0", tested=("0.32.0",),
        limits=(
            Limit("fc bias", None, "--engine sglang reads it"),
            Limit("refined blocks", "0.33.0", "--engine-version 0.33.0"),
            Limit("large or odd candidate sets", None, "train with objective.candidates=16"),
            Limit("reduced candidates", None, "train with draft.draft_vocab_size=null"),
        ),
        mute_targets=(
            "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration",
        ),
    ),
    "sglang": ServingEngine(
        "sglang", "SGLang", oldest="0.5.9", tested=("0.5.9", "0.5.23"),
        limits=(
            Limit("parallel drafting", None, "--engine vllm serves P-EAGLE"),
            Limit("blocks", "0.5.23", "--engine-version 0.5.23, or --engine vllm"),
            Limit("several layers", "0.5.23", "--engine-version 0.5.23, or --engine vllm"),
            *_norm_limits("0.5.23", "--engine-version 0.5.23, or --engine vllm"),
            Limit("other width", None, "--engine vllm takes a target of another width"),
            Limit("trained embeddings", None, "train with draft.freeze_embeddings=true"),
            Limit("last layer", None, "train with target.aux_layer_ids below the last layer"),
            Limit("partial rotary", None, "--engine vllm"),
            Limit("yarn attention factor", None, "--engine vllm"),
            Limit("reduced head", None, "train with draft.draft_vocab_size=null, or --engine vllm"),
            *_NOT_IN_LLAMA,
        ),
    ),
    "speculators": ServingEngine(
        "speculators", "speculators", oldest="0.9.0", tested=("0.9.0",),
        limits=(
            Limit("other width", None, "--engine vllm takes a target of another width"),
            Limit("partial rotary", None, "--engine vllm"),
            Limit("reduced candidates", None, "train with draft.draft_vocab_size=null"),
            Limit("causal blocks", None, "--engine vllm writes the flat layout, which says it"),
            Limit("sliding layers", None, "--engine vllm: vLLM misreads them in this layout"),
            *_NOT_IN_LLAMA,
        ),
    ),
    # versions: of the package xllamacpp, which names no build of llama.cpp
    "llama.cpp": ServingEngine(
        "llama.cpp", "llama.cpp", oldest="2026.10.11549", tested=("2026.10.11549",),
        limits=(
            Limit("several layers", None, "train with draft.layers=1, or --engine vllm"),
            Limit("not three aux layers", None, "--engine vllm"),
            *_norm_limits(None, "--engine vllm"),
            Limit("partial rotary", None, "--engine vllm"),
            Limit("yarn attention factor", None, "--engine vllm"),
            Limit("llama3 rotary of blocks", None, "--engine vllm"),
            Limit("causal blocks", None, "--engine vllm"),
            Limit("sliding layers", None, "--engine vllm: these attend both ways in llama.cpp"),
            Limit("last layer", None, "train with target.aux_layer_ids below the last layer"),
            *_NOT_IN_LLAMA,
        ),
        mute_targets=("Qwen2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        for_mute_targets="--engine vllm, or a target that llama.cpp passes them on for",
    ),
}  # fmt: skip
# vLLM reads the speculators format of P-EAGLE without these two flags.
SPECULATORS_PEAGLE_LIMITS = _norm_limits(
    None, "--engine vllm writes the plain format, which carries it"
)


def check_representable(
    engine: ServingEngine, layout: Format, version: str, features: frozenset[Feature]
) -> None:
    """Refuse a draft that the engine would misread, and name what would work."""
    refused = engine.refusals(features, version)
    if layout.name == "speculators-peagle":
        refused += [limit for limit in SPECULATORS_PEAGLE_LIMITS if limit.feature in features]
    if refused:
        first = refused[0]
        since = "" if first.since is None else f" (since {first.since})"
        raise BadInput(
            f"{engine.title} {version} cannot serve a draft with {first.feature}{since}",
            where=f"--engine {engine.name}",
            fix=first.instead,
        )


# --- the command that serves a draft -------------------------------------------------------------


ENGINE_MODULES = {
    "vllm": "vllm", "sglang": "sglang", "speculators": "vllm", "llama.cpp": "xllamacpp",
}  # fmt: skip


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
    method = METHODS[record["objective"]]
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
    if record["engine"] == "llama.cpp":
        return [
            "llama-server", "-m", target, "-md", f"{directory}/{record['file']}",
            "--spec-type", method.algorithms["llama.cpp"], "--spec-draft-n-max", str(depth),
            *([] if host is None else ["--host", host]),
            *([] if port is None else ["--port", str(port)]),
            *(["--alias", public_name(named or own_name).partition("@")[0]] if own_name else []),
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
    flags = [*method.vllm_flags, *flags]
    return ["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *flags]


def _identity_flags(name: str, dtype: str) -> list[str]:
    """Flags for what an engine would otherwise choose itself: the precision (float32 silently
    becomes 16 bits), and the name that clients and manifests use (a path on the server's disk)."""
    flags = ["--dtype", dtype] if dtype else []
    public = public_name(name).partition("@")[0]
    return [*flags, "--served-model-name", public] if name else flags
