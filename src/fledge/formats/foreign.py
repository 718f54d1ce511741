"""Drafts of other trainers: what their files contain, in fledge's own terms.

Presents all layouts alike (`layers.N.*`, a flat Llama config, layers as "output of layer i"), so
that checks and the import do not depend on the trainer. Nothing is judged here.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.reading import read_json
from fledge.formats.codec import (
    EAGLE1_CLASSES,
    EAGLE3_CLASS,
    EAGLE3_QWEN3_CLASS,
    INNER_KEY,
    LLAMA_KEYS,
    NESTED_KEY,
    NORM_FLAGS,
    SPECULATORS_KEY,
    get_path,
    set_path,
)
from fledge.formats.layouts import (
    CONFIG,
    LAYER_EXTRAS,
    MASK_KEYS,
    OURS,
    SGLANG,
    VLLM,
    AuxPlace,
    FileLayout,
    eagle1_layout,
    eagle3_layout,
)
from fledge.methods.base import Method
from fledge.methods.registry import METHODS
from fledge.methods.shared.config import PLACEHOLDER_KEY
from fledge.methods.shared.files import CONFIG_NAME
from fledge.models.weight_files import read_tensors

_STATED_TOKENS = "speculators_config.proposal_methods.0.speculative_tokens"


# --- names ---------------------------------------------------------------------------------------


# Prefixes that trainers' wrapper modules leave in tensor names.
_WRAPPERS = re.compile(r"^((_orig_mod|module|draft_model|eagle_module|model)\.)+")
_MIDLAYER = re.compile(r"^midlayer\.")
# SGLang's name for the input norm of deeper layers.
_DEEP_NORM = re.compile(r"(layers\.[1-9]\d*)\.hidden_norm\.")
# Not part of the draft: rebuilt on loading, or copies of the target's weights.
_JUNK = re.compile(r"(.*rotary_emb\..*|verifier_(lm_head|norm)\..*|target_model\..*)")
# Classes that belong to exactly one kind of draft.
KIND_OF_CLASS = {
    **dict.fromkeys(EAGLE1_CLASSES.values(), "eagle1"),
    EAGLE3_CLASS: "eagle3",
    EAGLE3_QWEN3_CLASS: "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaEagle3DraftModel": "eagle3",
    "PEagleDraftModel": "eagle3",
}


# --- files ---------------------------------------------------------------------------------------


@dataclass
class DraftFiles:
    """A draft's config and tensors as stored; repairs change them in place."""

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    def copy(self) -> "DraftFiles":
        return DraftFiles(self.directory, deepcopy(self.config), dict(self.tensors))

    @property
    def view(self) -> "DraftView":
        """The files in our terms, by the most special kind of draft that claims them."""
        kinds = reversed([method.foreign() for method in METHODS.values()])
        kind = next(kind for kind in kinds if kind.claims(self.config, self.tensors))
        return kind(self.config, self.tensors)

    def put(self, key: str, value: Any) -> None:
        """Set a config value where this layout keeps it; None removes it."""
        path = self.view.path(key)
        outer, _, name = path.rpartition(".")
        if value is not None:
            set_path(self.config, path, value)
        else:
            (get_path(self.config, outer) or {} if outer else self.config).pop(name, None)

    def put_tensor(self, own: str, value: Tensor) -> None:
        """Set the tensor that we call `own`, under its name in the file."""
        self.tensors[self.view.names.get(own, own)] = value

    def put_aux(self, layer_ids: list[int]) -> None:
        """Set the aux layers, given as outputs of layers, in the files' own convention."""
        for place in self.view.written_aux or [self.view.aux_place]:
            set_path(self.config, place.path, [layer + place.shift for layer in layer_ids])


def read_files(directory: Path) -> DraftFiles:
    """Read config.json and the weights: safetensors, sharded or not, or torch's own format."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        fix = "give the directory of a draft"
        raise BadInput(f"no {CONFIG_NAME} here", where=str(directory), fix=fix)
    config: dict[str, Any] = read_json(path, CONFIG, what="the config")
    return DraftFiles(directory, config, read_tensors(directory))


@dataclass(frozen=True)
class DraftView:
    """A draft's files in fledge's own terms: of EAGLE and P-EAGLE; other kinds inherit."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    aux_places: ClassVar[tuple[AuxPlace, ...]] = (OURS, VLLM, SGLANG)  # the first counts
    borrows: ClassVar[bool] = False  # embeddings and head are the target's, not in our files

    @classmethod
    def claims(cls, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """Whether files are of this kind, where no more special kind claims them."""
        return True

    def refusals(self) -> Iterator[str]:
        """Why our draft cannot represent these files."""
        if self.get("norm_before_fc"):
            yield "norm_before_fc is true: our drafts normalize each aux state separately (fc_norm)"
        supported = self.method.aux_layers()
        count = self.get("num_aux_hidden_states", supported)
        if count != supported:
            yield f"{count} aux states: our {self.method.title} drafts read {supported}"

    @cached_property
    def layout(self) -> FileLayout:
        if self.merges:
            return eagle1_layout(self.config)
        return eagle3_layout(self.config, self.tensors)

    # --- tensors ---------------------------------------------------------------------------------

    @cached_property
    def own_names(self) -> dict[str, str]:
        """The name in the file -> our name."""
        return {name: self.own_name(name) for name in self.tensors if not _JUNK.fullmatch(name)}

    @cached_property
    def names(self) -> dict[str, str]:
        """Our name -> the name in the file; if several match, the first in the file."""
        return {own: name for name, own in reversed(self.own_names.items())}

    def own_name(self, name: str) -> str:
        """`model.midlayer.mlp.up_proj.weight` -> `layers.0.mlp.up_proj.weight`."""
        name = _MIDLAYER.sub("layers.0.", _WRAPPERS.sub("", name))
        return _DEEP_NORM.sub(r"\1.input_layernorm.", name)

    def spellings(self, our_name: str) -> Iterable[str]:
        """Further names that engines read, where they differ from ours."""
        return ()

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return {our_name: self.tensors[name] for our_name, name in self.names.items()}

    @cached_property
    def layer_extras(self) -> dict[str, bool]:
        """Which optional parts the layers have, by their flag in our config."""
        parts = {re.sub(r"^layers\.\d+\.", "", name) for name in self.state}
        return {flag: not parts.isdisjoint(names) for flag, names in LAYER_EXTRAS.items()}

    @property
    def layer_numbers(self) -> list[int]:
        matches = (re.match(r"layers\.(\d+)\.", name) for name in self.state)
        return sorted({int(match[1]) for match in matches if match})

    # --- config ----------------------------------------------------------------------------------

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The config as one flat dict, with the nested Llama config merged in."""
        nested = self.layout.nested
        if not nested:
            return self.config
        beside = {key: value for key, value in self.config.items() if key not in LLAMA_KEYS}
        return {**(self.config.get(nested) or {}), **beside}

    def path(self, key: str) -> str:
        """The dotted path of a key in the config, whether or not it is set."""
        nested = self.layout.nested
        inside = key in LLAMA_KEYS or (key not in self.config and key in self.flat)
        return f"{nested}.{key}" if nested and inside else key

    def get(self, key: str, absent: Any = None) -> Any:
        value = self.flat.get(key)
        return absent if value is None else value

    @property
    def flags(self) -> dict[str, bool]:
        """Flags of optional parts that the files may have, and whether they have their tensors."""
        if self.borrows:
            return {}
        biases = {flag: self.layer_extras[flag] for flag in ("attention_bias", "mlp_bias")}
        return {NORM_FLAGS[0]: f"{NORM_FLAGS[0]}.0.weight" in self.state, **biases}

    @property
    def architectures(self) -> list[str]:
        """The classes that the config names."""
        return self.config.get("architectures") or []

    @cached_property
    def declared(self) -> set[str]:
        """The kinds of draft that the config claims: none, one, or by mistake both."""
        config = self.config
        kinds = {KIND_OF_CLASS.get(name, "") for name in config.get("architectures") or []}
        kinds |= {"eagle3"} if SPECULATORS_KEY in config else set()
        kinds |= {"eagle1"} if config.get("eagle_version") in (1, 2) else set()
        return kinds - {""}

    @cached_property
    def merges(self) -> bool:
        """Whether it is EAGLE-1 or 2: fc merges embedding and state before a plain layer 0. The
        tensors decide; without fc the config does."""
        fc = self.state.get("fc.weight")
        if fc is None or fc.ndim != 2 or "layers.0.hidden_norm.weight" in self.state:
            return "eagle1" in self.declared and "layers.0.hidden_norm.weight" not in self.state
        return tuple(fc.shape) == (len(fc), 2 * len(fc))

    @property
    def misnamed(self) -> bool:
        """Whether the config claims another kind of draft than the tensors show."""
        return bool(self.declared - {"eagle1" if self.merges else "eagle3"})

    @property
    def parallel(self) -> bool:
        """Whether it is P-EAGLE, by its config or its tensors."""
        return not self.merges and (
            self.config.get(SPECULATORS_KEY) == "peagle"
            or bool(self.get("parallel_drafting"))
            or "mask_hidden" in self.state
            or "PEagleDraftModel" in self.architectures
        )

    @property
    def method(self) -> Method:
        if self.merges:
            return METHODS["eagle2" if self.get("eagle_version") == 2 else "eagle1"]
        return METHODS["peagle" if self.parallel else "eagle3"]

    @property
    def method_settings(self) -> dict[str, Any]:
        """The keys of our config that only drafts of this method have."""
        if self.merges:
            version = 2 if self.get("eagle_version") == 2 else 1
            return {"eagle_version": version, "fc_bias": self.fc_bias is not None}
        mask = self.mask if self.parallel else None
        return {"parallel_drafting": self.parallel, PLACEHOLDER_KEY: mask}

    @property
    def fc_bias(self) -> Tensor | None:
        """The bias of EAGLE-1's fc; all zeros count as none, because SGLang requires a bias."""
        bias = self.state.get("fc.bias")
        return bias if bias is not None and bool(bias.any()) else None

    @property
    def mask_paths(self) -> list[str]:
        """Config paths of the mask token, in the order in which engines look; at least one."""
        paths = [f"{INNER_KEY}.{PLACEHOLDER_KEY}", *map(self.path, MASK_KEYS)]
        present = [path for path in paths if get_path(self.config, path) is not None]
        return present or [self.path(PLACEHOLDER_KEY)]

    @property
    def mask(self) -> int | None:
        token: int | None = get_path(self.config, self.mask_paths[0])
        return token

    @property
    def stated_tokens(self) -> int | None:
        """Tokens that a round proposes, if the speculators config states it."""
        stated = get_path(self.config, _STATED_TOKENS)
        return stated if type(stated) is int and stated > 0 else None

    @property
    def norm_before_residual(self) -> bool:
        """Whether the residual is the normed state; absent means true for speculators' EAGLE-3."""
        default = self.config.get(SPECULATORS_KEY) == "eagle3"
        return not self.merges and bool(self.get("norm_before_residual", default))

    # --- aux layers ------------------------------------------------------------------------------

    @property
    def written_aux(self) -> list[AuxPlace]:
        """All places at which the config has aux layers."""
        return [p for p in self.aux_places if get_path(self.config, p.path) is not None]

    @property
    def aux_place(self) -> AuxPlace:
        """The place of the ids in this layout, whether or not they are written."""
        return next(iter(self.written_aux), self.default_place)

    @property
    def default_place(self) -> AuxPlace:
        if self.layout.name == "fledge":
            return OURS
        return VLLM if self.layout.nested == NESTED_KEY else SGLANG

    def aux_at(self, place: AuxPlace) -> list[int] | None:
        """The ids at this place as outputs of layers; None if it has none."""
        stored = get_path(self.config, place.path)
        return None if stored is None else [layer - place.shift for layer in stored]

    @property
    def aux_layer_ids(self) -> list[int] | None:
        return self.aux_at(self.aux_place)
