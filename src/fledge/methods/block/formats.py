"""The file formats of DFlash and DSpark: what engines read, and drafts of any trainer in our terms.

Written:

    dflash-flat          z-lab's layout: config.json of a Qwen3, `dflash_config`       vLLM, SGLang
    dspark-flat          DeepSpec's: the same keys beside the others, two small heads  vLLM, SGLang
    speculators-dflash   the nested config of the speculators package, ids + 1  vLLM, speculators
    speculators-dspark   the same for DSpark

    gguf-dflash, gguf-dspark  one GGUF file                                     llama.cpp

The first four use our tensor names. All omit embedding and head, which are the target's. A draft
with a reduced vocabulary has its own rows of the head, because no engine takes them from the
target.

Read (nothing is judged here):

    fledge        ours
    dflash        z-lab's flat layout, and our exports: `dflash_config`
    dspark        DeepSpec's flat layout, and our exports: the same keys beside the others
    specforge     both, all keys in `dflash_config`, where `projector_type` tells them apart;
                  ModelOpt's too, with other names for the heads of DSpark
    speculators   the nested config of the speculators package; layers are counted + 1
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from fledge.formats.codec import (
    AUX_KEY,
    INNER_KEY,
    NESTED_KEY,
    SPECULATORS_KEY,
    Facts,
    Format,
    if_set,
    llama_keys,
    speculators_keys,
    taken,
)
from fledge.formats.foreign import DraftView
from fledge.formats.gguf_layout import RENAMED, GgufFormat, layer_keys
from fledge.formats.layouts import OURS, AuxPlace, FileLayout, by_name
from fledge.methods.base import Method
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.registry import METHODS
from fledge.methods.shared.config import PLACEHOLDER_KEY

# --- written --------------------------------------------------------------------------------------


def _qwen3_keys(facts: Facts) -> dict[str, Any]:
    sliding = facts["sliding_layers"]
    kinds = ("full_attention", "sliding_attention")
    keys = llama_keys(facts, "qwen3")
    keys["layer_types"] = [kinds[i in sliding] for i in range(facts["num_hidden_layers"])]
    if sliding:  # transformers' Qwen3 drops the window unless both are set
        keys |= {"use_sliding_window": True, **taken(facts, "sliding_window")}
    return keys


# Ours: an export in a flat layout is also a draft that `fledge eval` and `init_from` read.
_OWN = (
    "aux_layer_ids", "num_aux_hidden_states", "qk_norm", "causal", "sliding_layers",
    "confidence_head", "confidence_threshold", "confidence_temperatures", "draft_tokens",
)  # fmt: skip


def _flat_keys(facts: Facts, architecture: str) -> dict[str, Any]:
    keys = _qwen3_keys(facts) | {"architectures": [architecture]}
    keys |= taken(facts, "block_size", "draft_vocab_size", "target_hidden_size", PLACEHOLDER_KEY)
    keys |= if_set(facts, "num_target_layers", *_OWN)
    if facts["causal"]:  # for all layers; without it only the sliding ones are causal
        keys["is_causal"] = True
    return keys


def _dflash_flat(facts: Facts) -> dict[str, Any]:
    inner = taken(facts, PLACEHOLDER_KEY)
    return {**_flat_keys(facts, "DFlashDraftModel"), INNER_KEY: inner}


def _markov_keys(facts: Facts) -> dict[str, Any]:
    return {
        **taken(facts, "markov_rank", "sample_from_anchor"),
        "markov_head_type": "vanilla",
        "enable_confidence_head": facts["confidence_head"],
        "confidence_head_with_markov": facts["confidence_head"],
    }


def _dspark_flat(facts: Facts) -> dict[str, Any]:
    return {**_flat_keys(facts, "Qwen3DSparkModel"), **_markov_keys(facts)}


def _speculators(facts: Facts, kind: str, architecture: str) -> dict[str, Any]:
    keys = speculators_keys(facts, kind, architecture, _qwen3_keys(facts))
    return keys | taken(facts, "block_size", PLACEHOLDER_KEY)


def _speculators_dflash(facts: Facts) -> dict[str, Any]:
    return {**_speculators(facts, "dflash", "DFlashSpeculator"), "sample_from_anchor": False}


def _speculators_dspark(facts: Facts) -> dict[str, Any]:
    return {**_speculators(facts, "dspark", "DSparkSpeculator"), **_markov_keys(facts)}


_LAYER_IDS, _COUNTED_LAYERS = "target_layer_ids", "aux_hidden_state_layer_ids"
DFLASH_FLAT = Format("dflash-flat", _dflash_flat, f"{INNER_KEY}.{_LAYER_IDS}", always_aux_ids=True)
DSPARK_FLAT = Format("dspark-flat", _dspark_flat, _LAYER_IDS, always_aux_ids=True)
SPECULATORS_DFLASH, SPECULATORS_DSPARK = (
    Format(f"speculators-{kind}", keys, _COUNTED_LAYERS, aux_id_offset=1, always_aux_ids=True)
    for kind, keys in (("dflash", _speculators_dflash), ("dspark", _speculators_dspark))
)


def _gguf_keys(facts: Facts) -> dict[str, Any]:
    keys = {**layer_keys(facts), **taken(facts, "block_size")}
    return keys | {"tokenizer.ggml.mask_token_id": facts[PLACEHOLDER_KEY]}


def _dspark_gguf(facts: Facts) -> dict[str, Any]:
    return {**_gguf_keys(facts), **taken(facts, "sample_from_anchor")}


DFLASH_GGUF, DSPARK_GGUF = (
    GgufFormat(
        f"gguf-{kind}", keys, "target_layers", aux_id_offset=1, always_aux_ids=True,
        renamed=RENAMED, architecture="dflash",
    )
    for kind, keys in (("dflash", _gguf_keys), ("dspark", _dspark_gguf))
)  # fmt: skip


# --- read -----------------------------------------------------------------------------------------

_CLASSES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    BlockDraftModel.architecture: "",  # its config determines the kind
}
_KINDS = ("dflash", "dspark")
LAYOUTS = by_name(
    FileLayout("fledge", "fledge"),
    FileLayout("dflash", "z-lab, and our exports of DFlash"),
    FileLayout("dspark", "DeepSpec, and our exports of DSpark"),
    FileLayout("specforge", "SpecForge or ModelOpt"),
    FileLayout("speculators", "speculators", nested=NESTED_KEY),
)
_VLLM = AuxPlace("vllm", AUX_KEY, 1)
_FLAT, _BESIDE, _SPECULATORS = (
    AuxPlace(layout.name, layout.aux_ids_key, layout.aux_id_offset)
    for layout in (DFLASH_FLAT, DSPARK_FLAT, SPECULATORS_DFLASH)
)
_HEADS = {
    "markov_w": "markov_head.markov_w",
    "confidence_proj.": "confidence_head.proj.",
}  # ModelOpt


class BlockView(DraftView):
    """A block draft's files in fledge's own terms."""

    aux_places = (_VLLM, _FLAT, _BESIDE, _SPECULATORS, OURS)
    borrows = True
    merges = False  # only EAGLE-1 does
    parallel = False  # only P-EAGLE is
    misnamed = False

    @classmethod
    def claims(cls, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        """By its class, or by the norm after fc that no other kind has."""
        named = config.get("architectures") or []
        if config.get(SPECULATORS_KEY) in _KINDS or not _CLASSES.keys().isdisjoint(named):
            return True
        has_block_size = "block_size" in config or "block_size" in (config.get(INNER_KEY) or {})
        return has_block_size and any(
            name.removeprefix("model.") == "hidden_norm.weight" for name in names
        )

    def refusals(self) -> Iterator[str]:
        kind = self.setting("markov_head_type", "vanilla")
        if self.spark and kind != "vanilla":
            yield f"markov_head_type {kind}: only vanilla is supported"
        if self.slides_both_ways:
            yield "its sliding layers attend both ways inside a block: ours are causal there"

    def own_name(self, name: str) -> str:
        """As for other drafts; ModelOpt has other names for the heads."""
        name = super().own_name(name)
        theirs = next((prefix for prefix in _HEADS if name.startswith(prefix)), None)
        return name if theirs is None else _HEADS[theirs] + name.removeprefix(theirs)

    @cached_property
    def layout(self) -> FileLayout:
        named = self.config.get("architectures") or []
        if SPECULATORS_KEY in self.config:
            return LAYOUTS["speculators"]
        if BlockDraftModel.architecture in named:
            return LAYOUTS["fledge"]
        if "projector_type" in self.inner:
            return LAYOUTS["specforge"]
        return LAYOUTS[next((_CLASSES[name] for name in named if _CLASSES.get(name)), "dflash")]

    @cached_property
    def layer_extras(self) -> dict[str, bool]:
        return {**super().layer_extras, "qk_norm": True}

    @property
    def inner(self) -> dict[str, Any]:
        return self.config.get(INNER_KEY) or {}

    def setting(self, key: str, absent: Any = None) -> Any:
        """The value that engines read: from `dflash_config` if it is there, else from outside."""
        inner = self.inner.get(key)
        return self.get(key, absent) if inner is None else inner

    def path(self, key: str) -> str:
        """The dotted path of a key in the config, whether or not it is set."""
        return f"{INNER_KEY}.{key}" if key in self.inner else super().path(key)

    @property
    def spark(self) -> bool:
        """Whether it is DSpark: it has a Markov head, or its config says so."""
        kind = self.config.get(SPECULATORS_KEY)
        if kind in _KINDS:
            return bool(kind == "dspark")
        if self.layout.name == "specforge":
            return bool(self.setting("projector_type") == "dspark")
        has_markov_head = any(name.startswith("markov_head.") for name in self.state)
        return self.layout.name == "dspark" or has_markov_head

    @property
    def method(self) -> Method:
        return METHODS["dspark" if self.spark else "dflash"]

    @property
    def sample_from_anchor(self) -> bool:
        """Whether slot 0 predicts the first token; if absent, vLLM's default."""
        default = self.spark and self.layout.name not in ("speculators", "fledge")
        return bool(self.setting("sample_from_anchor", default))

    @property
    def _causal(self) -> bool | None:
        """Whether all layers are causal; None: the config does not say."""
        if self.layout.name == "fledge":
            return bool(self.get("causal", False))
        causal: bool | None = self.setting("is_causal", self.inner.get("causal"))
        return causal

    @property
    def sliding_layers(self) -> list[int]:
        if self.layout.name == "fledge":
            return list(self.get("sliding_layers", []))
        kinds = self.setting("layer_types", [])
        return [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]

    @property
    def slides_both_ways(self) -> bool:
        """Whether engines let the slots of sliding layers attend to later slots of their block."""
        if self.setting("use_swa"):  # ModelOpt's, for all layers
            return True
        return self.layout.name != "fledge" and bool(self.sliding_layers) and self._causal is False

    @property
    def first_place(self) -> int:
        return 0 if self.sample_from_anchor else 1

    @property
    def method_settings(self) -> dict[str, Any]:
        sliding = self.sliding_layers
        window = self.setting("sliding_window")
        return {
            "block_size": self.setting("block_size"),
            PLACEHOLDER_KEY: self.mask,
            "sample_from_anchor": self.sample_from_anchor,
            "causal": bool(self._causal),
            "sliding_layers": sliding,
            "sliding_window": window if sliding else None,
            "markov_rank": self.setting("markov_rank", 0) if self.spark else 0,
            "confidence_head": "confidence_head.proj.weight" in self.state,
            "confidence_threshold": self.get("confidence_threshold", 0.0),
            "confidence_temperatures": list(self.get("confidence_temperatures", [])),
        }

    @property
    def default_place(self) -> AuxPlace:
        places = {"fledge": OURS, "dspark": _BESIDE, "speculators": _SPECULATORS}
        return places.get(self.layout.name, _FLAT)
