"""Drafts of other trainers: what their files contain, in fledge's own terms.

`layouts` describes how each trainer's files differ from ours; this module presents all of them
alike (`layers.N.*`, a flat Llama config, layers as "output of layer i"), so that checks and the
import do not depend on the trainer. Nothing is judged here.
"""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fledge.core.errors import BadInput
from fledge.core.expected import Expected
from fledge.core.reading import check, read_json
from fledge.diagnosis.config_keys import CONFIG
from fledge.diagnosis.layouts import (
    NESTED_KEY,
    OWN_AUX_KEY,
    SPECULATORS_KEY,
    WRAPPED_KEY,
    WRAPPED_TYPE,
    FileLayout,
    eagle1_layout,
    eagle3_layout,
)
from fledge.draft.files import CONFIG_NAME
from fledge.export.formats import get_path, set_path
from fledge.methods.base import Method
from fledge.methods.registry import METHODS
from fledge.models.weight_files import read_tensors

AUX_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class AuxPlace:
    """A config key that may hold the aux layers, and what its ids add to "output of layer i".

    vLLM and speculators count residuals, of which there is one before layer 0; SGLang, ModelOpt
    and fledge count layers.
    """

    name: str
    path: str
    shift: int


AUX_PLACES = _OURS, _VLLM, _SGLANG = (
    AuxPlace("fledge", OWN_AUX_KEY, 0),
    AuxPlace("vllm", AUX_KEY, 1),
    AuxPlace("sglang", f"eagle_config.{AUX_KEY}", 0),
)

# Keys under which engines look for the mask token, in this order.
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Prefixes that trainers' wrapper modules leave in tensor names.
_WRAPPERS = re.compile(r"^((_orig_mod|module|draft_model|eagle_module|model)\.)+")
# Not part of the draft: rebuilt on loading, or copies of the target's weights.
_JUNK = re.compile(r"(.*rotary_emb\..*|verifier_(lm_head|norm)\..*|target_model\..*)")
# Tensors of layer 0 that show its width. The inputs of q, k and v then tell whether fc has merged
# embedding and state (EAGLE-1) or the layer reads them side by side (EAGLE-3).
_WIDTH_TENSORS = (
    "layers.0.self_attn.o_proj.weight",
    "layers.0.mlp.down_proj.weight",
    "layers.0.post_attention_layernorm.weight",
)
_INPUT_PROJECTIONS = tuple(f"layers.0.self_attn.{letter}_proj.weight" for letter in "qkv")
# Classes that belong to exactly one kind of draft.
_KIND_OF_CLASS = {
    "EagleLlamaForCausalLM": "eagle1",
    "LlamaForCausalLMEagle": "eagle1",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaEagle3DraftModel": "eagle3",
    "PEagleDraftModel": "eagle3",
}
_MIDLAYER = re.compile(r"^midlayer\.")
# SGLang's name for the input norm of deeper layers.
_DEEP_NORM = re.compile(r"(layers\.[1-9]\d*)\.hidden_norm\.")
# Optional parts of a layer: their flag in our config -> their tensors.
LAYER_EXTRAS = {
    "qk_norm": {f"self_attn.{letter}_norm.weight" for letter in "qk"},
    "attention_bias": {f"self_attn.{letter}_proj.bias" for letter in "qkvo"},
    "mlp_bias": {f"mlp.{name}_proj.bias" for name in ("gate", "up", "down")},
}


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
        from fledge.diagnosis.block_view import BlockView, is_block_draft  # it imports this module

        blocks = is_block_draft(self.config, self.tensors)
        return (BlockView if blocks else DraftView)(self.config, self.tensors)

    def put(self, key: str, value: Any) -> None:
        """Set a config value where this layout keeps it; None removes it."""
        *outer, name = self.view.path(key).split(".")
        section = self.config
        for part in outer:
            section = section[part]
        if value is None:
            section.pop(name, None)
        else:
            section[name] = value

    def put_mask(self, token: int) -> None:
        """Set the mask token under every key that holds it."""
        for path in self.view.mask_paths:
            set_path(self.config, path, token)

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
    if config.get("model_type") == WRAPPED_TYPE and config.get(WRAPPED_KEY) is not None:
        inner = f"the config under '{WRAPPED_KEY}'"
        check(config[WRAPPED_KEY], CONFIG, where=str(path), what=inner)
    files = DraftFiles(directory, config, read_tensors(directory))
    if (expected := files.view.expected) is not None:
        check(config, expected, where=str(path), what="the config")
    return files


@dataclass(frozen=True)
class DraftView:
    """A draft's files in fledge's own terms."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    expected: ClassVar[Expected | None] = None  # additional config keys of a kind

    @cached_property
    def layout(self) -> FileLayout:
        if self.merges:
            return eagle1_layout(self.config)
        return eagle3_layout(self.config, self.tensors)

    # --- tensors ---------------------------------------------------------------------------------

    @cached_property
    def names(self) -> dict[str, str]:
        """Our name -> the name in the file; if several match, the first in the file."""
        names: dict[str, str] = {}
        for name in self.tensors:
            if not _JUNK.fullmatch(name):
                names.setdefault(self.own_name(name), name)
        return names

    def own_name(self, name: str) -> str:
        """`model.midlayer.mlp.up_proj.weight` -> `layers.0.mlp.up_proj.weight`."""
        name = _MIDLAYER.sub("layers.0.", _WRAPPERS.sub("", name))
        return _DEEP_NORM.sub(r"\1.input_layernorm.", name)

    @cached_property
    def clashes(self) -> list[str]:
        """Names in the file of tensors that it already has under another name."""
        taken = set(self.names.values())
        return [name for name in self.tensors if name not in taken and name not in self.junk]

    @cached_property
    def junk(self) -> list[str]:
        return [name for name in self.tensors if _JUNK.fullmatch(name)]

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return {our_name: self.tensors[name] for our_name, name in self.names.items()}

    @cached_property
    def layer_extras(self) -> dict[str, bool]:
        """Which optional parts the layers have, by their flag in our config."""
        parts = {re.sub(r"^layers\.\d+\.", "", name) for name in self.state}
        return {flag: bool(parts & names) for flag, names in LAYER_EXTRAS.items()}

    @property
    def layer_numbers(self) -> list[int]:
        matches = (re.match(r"layers\.(\d+)\.", name) for name in self.state)
        return sorted({int(match[1]) for match in matches if match})

    # --- config ----------------------------------------------------------------------------------

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The config as one flat dict, with the nested Llama config merged in."""
        layout, outer = self.layout, self.config
        if not layout.nested:
            return {key: value for key, value in outer.items() if key != NESTED_KEY}
        beside = {key: value for key, value in outer.items() if key in layout.beside}
        return {**(outer.get(layout.nested) or {}), **beside}

    def path(self, key: str) -> str:
        """The dotted path of a key in the config, whether or not it is set."""
        inside = self.layout.nested and key not in self.layout.beside
        return f"{self.layout.nested}.{key}" if inside else key

    def get(self, key: str, absent: Any = None) -> Any:
        value = self.flat.get(key)
        return absent if value is None else value

    @property
    def architectures(self) -> list[str]:
        """The classes that the config names; a wrapped config names the draft's inside."""
        named = self.flat if self.layout.nested == WRAPPED_KEY else self.config
        return named.get("architectures") or []

    @cached_property
    def declared(self) -> set[str]:
        """The kinds of draft that the config claims: none, one, or by mistake both."""
        kinds = {_KIND_OF_CLASS.get(name, "") for name in self.config.get("architectures") or []}
        if SPECULATORS_KEY in self.config:
            kinds.add("eagle3")
        wrapped = self.config.get("model_type") == WRAPPED_TYPE
        if wrapped or self.config.get("eagle_version") in (1, 2):
            kinds.add("eagle1")
        return kinds - {""}

    @cached_property
    def merges(self) -> bool:
        """Whether it is EAGLE-1 or 2: fc merges embedding and state before a plain layer 0.

        The tensors decide by majority, because one of them may be wrong or missing; if they are
        undecided, the config decides.
        """
        votes = sum(_merging_votes(self.state))
        return votes > 0 if votes else "eagle1" in self.declared

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
        mask_token_id = self.mask_token_id if self.parallel else None
        return {"parallel_drafting": self.parallel, "mask_token_id": mask_token_id}

    @property
    def fc_bias(self) -> Tensor | None:
        """The bias of EAGLE-1's fc; all zeros count as none, because SGLang requires a bias."""
        bias = self.state.get("fc.bias")
        return bias if bias is not None and bool(bias.any()) else None

    @property
    def mask_paths(self) -> list[str]:
        """Config paths of the mask token, in the order in which engines look; at least one."""
        paths = ["dflash_config.mask_token_id", *map(self.path, MASK_KEYS)]
        present = [path for path in paths if get_path(self.config, path) is not None]
        return present or [self.path(MASK_KEYS[0])]

    @property
    def mask_token_id(self) -> Any:
        return get_path(self.config, self.mask_paths[0])

    @property
    def speculative_tokens(self) -> int | None:
        """Tokens that a round proposes, if the speculators config states it."""
        stated = get_path(self.config, "speculators_config.proposal_methods.0.speculative_tokens")
        return stated if type(stated) is int and stated > 0 else None

    @property
    def norm_before_residual(self) -> bool:
        """Whether the residual is the normed state; absent means true for speculators' EAGLE-3."""
        default = self.config.get(SPECULATORS_KEY) == "eagle3"
        return bool(self.get("norm_before_residual", default))

    # --- aux layers ------------------------------------------------------------------------------

    @property
    def written_aux(self) -> list[AuxPlace]:
        """All places at which the config has aux layers."""
        return [place for place in AUX_PLACES if get_path(self.config, place.path) is not None]

    @property
    def aux_place(self) -> AuxPlace:
        """The place of the ids in this layout, whether or not they are written."""
        if written := self.written_aux:
            return written[0]
        if self.layout.name == "fledge":
            return _OURS
        return _VLLM if self.layout.nested == NESTED_KEY else _SGLANG

    @property
    def stored_aux(self) -> Any:
        """The ids exactly as in the file; None if it has none."""
        return get_path(self.config, self.aux_place.path)

    def aux_at(self, place: AuxPlace) -> list[int] | None:
        """The ids at this place as outputs of layers; None unless it holds a list of ints."""
        stored = get_path(self.config, place.path)
        if not isinstance(stored, list) or not all(type(layer) is int for layer in stored):
            return None
        return [layer - place.shift for layer in stored]

    @property
    def aux_layer_ids(self) -> list[int] | None:
        return self.aux_at(self.aux_place)


def _merging_votes(state: Mapping[str, Tensor]) -> Iterator[int]:
    """+1 for every tensor that implies a merging fc, -1 for what only a fused layer 0 has."""
    if any(name.startswith(("layers.0.hidden_norm.", "fc_norm.", "mask_hidden")) for name in state):
        yield -1
    widths = [state[name].shape[0] for name in _WIDTH_TENSORS if name in state and state[name].ndim]
    if not widths:
        return
    width = max(widths, key=widths.count)
    for name in _INPUT_PROJECTIONS:
        shape = tuple(state[name].shape) if name in state else ()
        if len(shape) == 2:
            yield {width: 1, 2 * width: -1}.get(shape[1], 0)
    if "fc.weight" in state:
        yield 1 if tuple(state["fc.weight"].shape) == (width, 2 * width) else -1


def tokens_marked(ids_W: Tensor, full: int) -> Tensor:
    """The mask t2d: [V], true at these ids."""
    mask_V = torch.zeros(full, dtype=torch.bool)
    mask_V[ids_W] = True
    return mask_V
