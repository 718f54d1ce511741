"""Kinds of targets: everything that depends on the target backend, one object per kind, by name.

A kind defines its section of a recipe and how its backend is opened. Its module imports neither
torch nor an engine at import time: recipes are read before anything heavy is needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from fledge.core.errors import BadInput, MissingPackage, nearest
from fledge.core.install import install_extra
from fledge.core.registry import Registry
from fledge.core.settings import Count, PositiveCount, PositiveShare, Section, Text

if TYPE_CHECKING:
    import torch

    from fledge.target.base import Eagle3TargetBackend


_DTYPE_ALIASES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "float8": "fp8"}


def spelt_out(value: Any) -> Any:
    """The full name of a dtype given by its short name; other values are returned unchanged."""
    return _DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value


def _comma_separated(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


class TargetSection(Section):
    """Fields that all kinds share, so that they survive a switch of `target.backend`."""

    backend: str
    """Narrowed by each kind to its own name; declared here so that it comes first."""

    model: Text | None = None
    """Documented by each kind, as what it is needed for differs."""

    aux_layer_ids: Annotated[tuple[Count, ...], BeforeValidator(_comma_separated)] | None = None
    """Decoder layers that feed the draft, in order (EAGLE-3: three); null: the method's own."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


SectionT = TypeVar("SectionT", bound=TargetSection)


class Parallel(Section):
    """How many processes hold one copy of the target together: fsdp x tp x cp of them."""

    fsdp: PositiveCount = 1
    """Processes that each hold a slice of every weight, and run their own rows (FSDP2)."""

    tp: PositiveCount = 1
    """Processes that each hold some heads and some of every layer's width, and run all rows."""

    cp: PositiveCount = 1
    """Processes that each run a part of every row: for rows too long for one."""

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp * self.cp


class TargetKind(ABC, Generic[SectionT]):
    """One kind of target."""

    name: ClassVar[str]  # value of `target.backend` in its recipes
    section: type[SectionT]  # of a recipe
    brings_rows: ClassVar[bool] = False  # it answers only about its own rows (`known_rows`)
    shows_any_layers: ClassVar[bool] = False  # a server's or a cache's layers were fixed before

    @abstractmethod
    def open(
        self, section: SectionT, *, device: "torch.device", aux_layers: int
    ) -> "Eagle3TargetBackend":
        """Open the target; `aux_layers` is how many layers it returns if the section names none."""

    def model_name(self, section: SectionT) -> str:
        """The model whose config and tokenizer are used."""
        if section.model is None:
            raise BadInput("no model for the tokenizer", where="target.model")
        return section.model

    # --- used before a target is opened ---------------------------------------------------------

    def aux_layer_ids(self, section: SectionT) -> Sequence[int] | None:
        """The layers that it will return; None: the default ones of its model."""
        return section.aux_layer_ids

    def dtype(self, section: SectionT, device: "torch.device") -> "torch.dtype":
        """The precision in which it will answer, as far as its config states it."""
        import torch

        from fledge.target.cache.format import DTYPES

        stored = getattr(target_config(section), "dtype", None) or torch.float32
        if stored not in DTYPES.values() or (device.type == "cuda" and stored == torch.float32):
            return torch.bfloat16  # such a model runs in bfloat16
        return stored

    def cut(self, section: SectionT) -> Parallel | None:
        """How it is sharded over the training ranks; None: it runs elsewhere."""
        return None

    def draft_vocab_size(self, section: SectionT) -> int | None:
        """Size of the draft vocabulary that its answers are limited to; None: no restriction."""
        return None

    def asked_once(self, section: SectionT) -> SectionT:
        """The section for a target that is asked about every row once, as in a precompute."""
        return section

    def placed(
        self, section: SectionT, *, aux_layers: int, name: str
    ) -> AbstractContextManager[Mapping[str, str]]:
        """Start what all ranks of a run on a cluster share and what outlives them, under the run's
        name; yields the environment variables by which the ranks find it."""
        return nullcontext({})

    def kept_bytes(self, section: SectionT) -> int:
        """Memory for answers that later epochs reuse instead of asking again."""
        return 0


class LoadedTarget(TargetSection):
    """A kind that loads the weights itself."""

    model: Text = "smollm2-135m"
    """Directory, .gguf file, embedded name (smollm2-135m) or hub id (org/name@revision)."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "fp8"], BeforeValidator(spelt_out)
    ] = "auto"
    """Precision of the target's forward; auto: as stored, but float32 is bfloat16 where the device
    multiplies it (on a CPU: of GGUF models only). Train on what will be served."""

    supervision: Literal["hidden", "probs", "logits"] = "hidden"
    """How the target's answer travels: hidden states suit every objective and loss."""


LoadedT = TypeVar("LoadedT", bound=LoadedTarget)


class LoadedKind(TargetKind[LoadedT]):
    """Defaults of the kinds that load weights."""

    shows_any_layers = True

    def dtype(self, section: LoadedT, device: "torch.device") -> "torch.dtype":
        from fledge.target.cache.format import DTYPES

        return DTYPES.get(section.dtype) or super().dtype(section, device)


class EngineTarget(LoadedTarget):
    """A target inside a serving engine."""

    tp_size: PositiveCount = 1
    """GPUs the target is split over."""

    memory_fraction: PositiveShare | None = None
    """Share of GPU memory (gpu_memory_utilization, mem_fraction_static); null: the engine's."""

    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the engine by their own names, for example page_size, enforce_eager."""


EngineT = TypeVar("EngineT", bound=EngineTarget)


class EngineKind(LoadedKind[EngineT]):
    """A serving engine in this process, imported when the target is opened."""

    backend: ClassVar[str]  # its class, as `module:class`
    argument_names: ClassVar[tuple[str, str]]  # the engine's own, of tp_size and memory_fraction

    def own_arguments(self, section: EngineT, device: "torch.device") -> dict[str, Any]:
        """Arguments of its backend beyond those that all engines share."""
        return {}

    def open(
        self, section: EngineT, *, device: "torch.device", aux_layers: int
    ) -> "Eagle3TargetBackend":
        tp_size = section.tp_size if section.tp_size > 1 else None
        given = zip(self.argument_names, (tp_size, section.memory_fraction), strict=True)
        arguments = {name: value for name, value in given if value is not None}
        if section.trust_remote_code:
            arguments["trust_remote_code"] = True
        try:
            backend: Eagle3TargetBackend = self._backend().from_pretrained(
                section.model,
                aux_layer_ids=section.aux_layer_ids,
                dtype=section.dtype,
                supervision=section.supervision,
                num_aux_layers=aux_layers if section.aux_layer_ids is None else None,
                **self.own_arguments(section, device),
                **{**arguments, **section.engine_args},
            )
        except BadInput as error:  # the engine names only itself: add the recipe key that chose it
            key = f"target.backend={self.name}"
            where = error.where if key in error.where else f"{key} {error.where}".strip()
            raise BadInput(error.what, where=where, fix=error.fix) from error
        return backend

    def _backend(self) -> Any:
        module, _, name = self.backend.partition(":")
        try:
            return getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            fix = install_extra(self.name)
            raise MissingPackage(f"{error.name} is not installed", fix=fix) from error


TARGET_KINDS: Registry[TargetKind[Any]] = Registry(
    "target.backend",
    {
        "hf": "fledge.target.hf.kind:HF",
        "remote": "fledge.target.remote.kind:REMOTE",
        "cache": "fledge.target.cache.kind:CACHE",
        "sglang": "fledge.target.sglang.kind:SGLANG",
        "vllm": "fledge.target.vllm.kind:VLLM",
        "ray": "fledge.target.ray.kind:RAY",
    },
)


def target_sections() -> dict[str, type[TargetSection]]:
    """The recipe sections of all kinds, by name."""
    return {name: kind.section for name, kind in TARGET_KINDS.items()}


def loaded_sections() -> dict[str, type[LoadedTarget]]:
    """The recipe sections of the kinds that load weights into the calling process, by name."""
    return {n: k.section for n, k in TARGET_KINDS.items() if isinstance(k, LoadedKind)}


def kind_of(section: TargetSection) -> TargetKind[Any]:
    """The kind that a section belongs to."""
    return TARGET_KINDS.named(section.backend)


def model_name(section: TargetSection) -> str:
    """The model whose config and tokenizer a target uses."""
    return kind_of(section).model_name(section)


def target_config(section: TargetSection) -> Any:
    """A target's transformers config, subject to the section's `trust_remote_code`."""
    from fledge.models.resolve import load_config

    return load_config(model_name(section), trust_remote_code=section.trust_remote_code)


def target_tokenizer(section: TargetSection) -> Any:
    """A target's tokenizer, subject to the section's `trust_remote_code`."""
    from fledge.models.resolve import load_tokenizer

    return load_tokenizer(model_name(section), trust_remote_code=section.trust_remote_code)


def engine_section(engine: str, **given: Any) -> LoadedTarget:
    """The section of a target loaded in this process, from command-line flags; flags that the kind
    has no field for are ignored."""
    engines = loaded_sections()
    if engine not in engines:
        raise BadInput(f"no engine {engine!r}", where="engine", fix=nearest(engine, [*engines]))
    section = engines[engine]
    fields = {name: value for name, value in given.items() if name in section.model_fields}
    try:
        return section.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        flag = str(first["loc"][0]).replace("_", "-") if first["loc"] else "engine"
        raise BadInput(f"{first['msg']}, got {first['input']!r}", where=f"--{flag}") from error
