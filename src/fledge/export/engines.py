"""The engines that load drafts: which versions are known, and what each cannot serve.

What they read, file by file, is in `formats`. Nothing here imports an engine.
"""

from dataclasses import dataclass
from typing import Literal

from packaging.version import Version

from fledge.core.errors import BadInput
from fledge.export.rules import Feature

EngineName = Literal["vllm", "sglang", "speculators"]


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

    def check_target(self, architectures: list[str], *, inner_states: bool) -> None:
        """Refuse a draft that needs inner states which the engine does not pass for this target."""
        unsupported = [name for name in architectures if name in self.mute_targets]
        if inner_states and unsupported:
            raise BadInput(
                f"{self.title} does not pass the inner states of {unsupported[0]} to drafts",
                where=f"--engine {self.name}",
                fix="train objective.kind=eagle1, which needs only the last state",
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

    def oldest_for(self, features: frozenset[Feature]) -> str:
        """The oldest version that serves a draft with these features."""
        since = [limit.since for limit in self.limits if limit.feature in features]
        return max([self.oldest, *filter(None, since)], key=Version)


_FROZEN = "train with draft.freeze_embeddings=true, or export with --target-embeddings"
_NOT_IN_LLAMA = (
    Limit("attention bias", None, "train with draft.attention_bias=false, or --engine vllm"),
    Limit("mlp bias", None, "train with draft.mlp_bias=false, or --engine vllm"),
    Limit("q/k norms", None, "train with draft.qk_norm=false, or --engine vllm"),
)
ENGINES: dict[EngineName, ServingEngine] = {
    "vllm": ServingEngine(
        "vllm", "vLLM", oldest="0.16.0", tested=("0.32.0",),
        limits=(
            Limit("blocks", "0.32.0", "serve with vLLM 0.32"),
            Limit("fc_norm", "0.32.0", "train without it, or serve with vLLM 0.32"),
            Limit("norm_output", "0.32.0", "train without it, or serve with vLLM 0.32"),
            Limit("partial rotary", "0.32.0", "serve with vLLM 0.32"),
            Limit("q/k norms", "0.32.0", "train without them, or serve with vLLM 0.32"),
            Limit("fc bias", None, "--engine sglang reads it"),
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
            Limit("fc_norm", "0.5.23", "--engine-version 0.5.23, or --engine vllm"),
            Limit("norm_output", "0.5.23", "--engine-version 0.5.23, or --engine vllm"),
            Limit("other width", None, "--engine vllm takes a target of another width"),
            Limit("trained embeddings", None, f"it always uses the target's: {_FROZEN}"),
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
            Limit("causal blocks", None, "--engine vllm writes the flat layout, which says it"),
            Limit("sliding layers", None, "--engine vllm: vLLM misreads them in this layout"),
            *_NOT_IN_LLAMA,
        ),
    ),
}  # fmt: skip
# vLLM reads the speculators format of P-EAGLE without these two flags.
SPECULATORS_PEAGLE_LIMITS = (
    Limit("fc_norm", None, "--engine vllm writes the plain format, which carries it"),
    Limit("norm_output", None, "--engine vllm writes the plain format, which carries it"),
)
