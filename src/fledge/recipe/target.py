"""Recipe sections of the target: who answers, one kind per backend. Imports no torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from fledge.core.settings import (
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    Text,
    Texts,
)

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float8": "fp8"}


def _spelt_out(value: Any) -> Any:
    return _SHORT.get(value, value) if isinstance(value, str) else value


Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16", "fp8"], BeforeValidator(_spelt_out)
]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")]


def _comma_separated(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


class TargetSection(Section):
    """What every backend shares, so that it survives a switch of `target.backend`."""

    backend: str
    """Each kind says its own name; it stands here so that it comes first."""

    model: Text | None = None
    """Each kind says what it needs the name for."""

    aux_layer_ids: Annotated[tuple[Count, ...], BeforeValidator(_comma_separated)] | None = None
    """Three decoder layers whose outputs feed the draft, in this order; null: 1, n/2 - 1, n - 4."""


class _LoadedTarget(TargetSection):
    """A backend that loads the weights itself."""

    model: Text = "smollm2-135m"
    """Directory, .gguf file, embedded name (smollm2-135m) or hub id (org/name@revision)."""

    dtype: Dtype = "auto"
    """Precision of the target's forward; auto: as stored. Train on what will be served."""

    supervision: Literal["hidden", "probs", "logits"] = "hidden"
    """How the target's answer travels: hidden states suit every objective and loss."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


class HfTarget(_LoadedTarget):
    """The target in the training process, through Hugging Face transformers."""

    backend: Literal["hf"] = "hf"
    """Co-located: simplest, and right up to what fits beside the draft."""

    device: Device = "auto"
    """auto: the trainer's own device."""

    attn_implementation: (
        Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None
    ) = None
    """Attention of transformers; null: its own choice."""

    compile: bool = True
    """On a GPU, compile the target's layers; small models run as CUDA graphs."""

    keep_states_gb: NonNegative = 0.0
    """Keep the target's states in memory up to this size: later epochs then need no target."""


class SglangTarget(_LoadedTarget):
    """The target inside SGLang, in this process (extra: sglang)."""

    backend: Literal["sglang"] = "sglang"
    """SGLang's ModelRunner computes the states: the numbers that SGLang will serve."""

    tp_size: PositiveCount = 1
    """GPUs the target is split over."""

    memory_fraction: PositiveShare | None = None
    """Share of GPU memory for the engine (mem_fraction_static); null: the engine's choice."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further ServerArgs by their own names, for example attention_backend, page_size."""


class VllmTarget(_LoadedTarget):
    """The target inside vLLM, in this process (extra: vllm)."""

    backend: Literal["vllm"] = "vllm"
    """vLLM's hidden-state extraction computes the states: the numbers that vLLM will serve."""

    tp_size: PositiveCount = 1
    """GPUs the target is split over."""

    memory_fraction: PositiveShare | None = None
    """Share of GPU memory for the engine (gpu_memory_utilization); null: the engine's choice."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further engine arguments by their own names, for example enforce_eager, max_model_len."""


class RemoteTarget(TargetSection):
    """The target on servers started with `fledge serve-target`."""

    backend: Literal["remote"] = "remote"
    """Target and draft in separate processes, on one machine or on many."""

    model: Text | None = None
    """Where config and tokenizer come from; null: from the servers."""

    urls: Annotated[Texts, Field(min_length=1)] = ("http://127.0.0.1:8700",)
    """One or more servers with the same target; requests go to the least loaded."""

    supervision: Literal["hidden", "probs", "topk"] = "hidden"
    """What travels: hidden states by default, probabilities or top-k on thin links."""

    top_k: PositiveCount = 64
    """Probabilities that travel for each token (topk)."""

    wire_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of what travels; auto: the target's own, which loses nothing."""

    merge: bool = False
    """Let a server run small requests of several trainers together; equal to rounding only."""

    token_env: Text | None = None
    """Name of the environment variable that holds the bearer token; null: none is sent."""

    ca_file: Text | None = None
    """Certificate bundle for https servers that the system does not know."""

    prefetch: PositiveCount = 2
    """Batches asked for ahead of the trainer."""

    timeout_s: Positive = 120.0
    """How long one request may take before it is sent again elsewhere."""

    retries: Count = 5
    """Attempts after the first one, each after a longer pause."""

    wait_s: NonNegative = 300.0
    """How long to wait while no server answers before the run stops, resumable."""

    shared_memory: bool = True
    """Use shared memory instead of the network when a server runs on this machine."""

    @field_validator("urls")
    @classmethod
    def _http(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"'{url}' must start with http:// or https://")
        return urls


class CacheTarget(TargetSection):
    """The target's answers from disk, written by `fledge precompute`."""

    backend: Literal["cache"] = "cache"
    """The target is not loaded at all; data.train is ignored, the rows lie in the cache."""

    model: Text | None = None
    """Checked against the model that the cache was made from; null: take the cache's."""

    cached_target_path: Text
    """Directory of the cache; giving it chooses this backend."""

    on_damage: Literal["fail", "skip"] = "fail"
    """What to do with a row whose checksum does not fit."""


def target_sections() -> dict[str, type[TargetSection]]:
    """The sections by the name of their kind."""
    kinds = (HfTarget, RemoteTarget, CacheTarget, SglangTarget, VllmTarget)
    return {kind.model_fields["backend"].default: kind for kind in kinds}
