"""The file formats of block drafts: what engines read, and drafts of any trainer in our terms.

Written:

    dflash-flat          z-lab's layout: config.json of a Qwen3, `dflash_config`       vLLM, SGLang
    dspark-flat          DeepSpec's: the same keys beside the others, two small heads  vLLM, SGLang
    speculators-dflash   the nested config of the speculators package, ids + 1  vLLM, speculators
    speculators-dspark   the same for DSpark
    dflash2-flat         z-lab's layout, head and convolutions in `dflash_config`      vLLM, SGLang
    lilicorr-flat        the same for LiLiCorr                                         vLLM, SGLang
    domino-flat          ModelOpt's, with SpecForge's keys                             SGLang
    xpress-flat          z-lab's, the head's keys beside the others                    vLLM 0.33
    speculators-dflash2, speculators-xpress                             vLLM, speculators

    gguf-dflash, gguf-dspark  one GGUF file                                     llama.cpp

All but Domino's, XPress's and GGUF files use our tensor names, and all omit embedding and head,
which are the target's. A draft with a reduced vocabulary has its own rows of the head, because no
engine takes them from the target.

Read (nothing is judged here):

    fledge        ours
    dflash        z-lab's flat layout, and our exports: `dflash_config`
    dspark        DeepSpec's flat layout, and our exports: the same keys beside the others
    specforge     both, all keys in `dflash_config`, where `projector_type` tells them apart;
                  ModelOpt's too, with other names for the heads of DSpark
    speculators   the nested config of the speculators package; layers are counted + 1
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
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
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.heads.xpress import MLP_RATIO
from fledge.methods.registry import METHODS
from fledge.methods.shared.config import PLACEHOLDER_KEY

DEFAULTS = {key.name: key.default for key in fields(BlockConfig)}

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
    "candidate_head", "candidates", "selector_rank", "conv_kernel_size", "conv_group_size",
    "sliding_both_ways", *(name for name in DEFAULTS if name.startswith("lilicorr_")),
)  # fmt: skip


def _flat_keys(facts: Facts, architecture: str) -> dict[str, Any]:
    keys = _qwen3_keys(facts) | {"architectures": [architecture]}
    keys |= taken(facts, "block_size", "draft_vocab_size", "target_hidden_size", PLACEHOLDER_KEY)
    keys |= if_set(facts, "num_target_layers", *_OWN)
    if facts["causal"]:  # for all layers; without it only the sliding ones are causal
        keys["is_causal"] = True
    elif facts.get("sliding_both_ways"):
        keys["is_causal"] = False
    return keys


def _dflash_flat(facts: Facts) -> dict[str, Any]:
    inner = taken(facts, PLACEHOLDER_KEY)
    return {**_flat_keys(facts, "DFlashDraftModel"), INNER_KEY: inner}


def _told(facts: Facts, *names: str) -> dict[str, Any]:
    """Settings of a head, which our configs leave out where they are the defaults."""
    return {name: facts.get(name, DEFAULTS[name]) for name in names}


def _candidate_flat(facts: Facts, architecture: str, head: dict[str, Any]) -> dict[str, Any]:
    keys = _flat_keys(facts, architecture)
    if not facts["sliding_layers"]:
        keys.setdefault("is_causal", False)
    conv = _told(facts, "conv_kernel_size", "conv_group_size")
    inner = taken(facts, PLACEHOLDER_KEY, "block_size") | head
    return {**keys, INNER_KEY: inner | (conv if conv["conv_kernel_size"] else {})}


def _selector_keys(facts: Facts) -> dict[str, Any]:
    told = _told(facts, "candidates", "selector_rank")
    return {"selector_rank": told["selector_rank"], "selector_top_k": told["candidates"]}


def _dflash2_flat(facts: Facts) -> dict[str, Any]:
    return _candidate_flat(facts, "DFlash2DraftModel", _selector_keys(facts))


def _lilicorr_flat(facts: Facts) -> dict[str, Any]:
    head = _told(facts, *(name for name in DEFAULTS if name.startswith("lilicorr_")))
    head |= {
        "lilicorr_enabled": True,
        "lilicorr_candidate_topk": _told(facts, "candidates")["candidates"],
    }
    return _candidate_flat(facts, "LiLiCorrDraftModel", head)


def _domino_flat(facts: Facts) -> dict[str, Any]:
    head = {
        "projector_type": "domino",
        "emb_dim": facts["markov_rank"],
        **_told(facts, "gru_hidden_dim", "pure_draft_prefix_len"),
        "shift_label": facts["sample_from_anchor"],
    }
    inner = taken(facts, PLACEHOLDER_KEY) | head
    # SGLang knows this class only; SpecForge and ModelOpt have the keys outside as well
    return {**_flat_keys(facts, "DFlashDraftModel"), **head, INNER_KEY: inner}


def _xpress_flat(facts: Facts) -> dict[str, Any]:
    rank = facts["markov_rank"]
    return {
        **_flat_keys(facts, "Qwen3XPressModel"),
        "xpress_rank": rank,
        "xpress_mlp_hidden": MLP_RATIO * rank,
        "xpress_block_size": facts["block_size"],
        "xpress_num_passes": _told(facts, "num_jacobi_passes")["num_jacobi_passes"],
        "xpress_topc": 0,  # all tokens, as in training
        "sample_from_anchor": False,
        INNER_KEY: taken(facts, PLACEHOLDER_KEY),
    }


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


def _speculators_dflash2(facts: Facts) -> dict[str, Any]:
    keys = _speculators(facts, "dflash2", "DFlash2DraftModel")
    keys |= _told(facts, "conv_kernel_size", "conv_group_size") | _selector_keys(facts)
    return {**keys, "sample_from_anchor": False, "sliding_window_non_causal": True}


def _speculators_xpress(facts: Facts) -> dict[str, Any]:
    keys = _speculators(facts, "xpress", "XPressSpeculator")
    keys |= _told(facts, "num_jacobi_passes")
    head = {"xpress_rank": facts["markov_rank"], "xpress_mlp_ratio": MLP_RATIO}
    return {**keys, **head, "sample_from_anchor": False}


_LAYER_IDS, _COUNTED_LAYERS = "target_layer_ids", "aux_hidden_state_layer_ids"
DFLASH_FLAT = Format("dflash-flat", _dflash_flat, f"{INNER_KEY}.{_LAYER_IDS}", always_aux_ids=True)
DSPARK_FLAT = Format("dspark-flat", _dspark_flat, _LAYER_IDS, always_aux_ids=True)
SPECULATORS_DFLASH, SPECULATORS_DSPARK = (
    Format(f"speculators-{kind}", keys, _COUNTED_LAYERS, aux_id_offset=1, always_aux_ids=True)
    for kind, keys in (("dflash", _speculators_dflash), ("dspark", _speculators_dspark))
)
_INNER_IDS = f"{INNER_KEY}.{_LAYER_IDS}"
DFLASH2_FLAT = Format("dflash2-flat", _dflash2_flat, _INNER_IDS, always_aux_ids=True)
LILICORR_FLAT = Format("lilicorr-flat", _lilicorr_flat, _INNER_IDS, always_aux_ids=True)
DOMINO_FLAT = Format(
    "domino-flat", _domino_flat, _INNER_IDS, always_aux_ids=True,
    renamed={r"^domino_head\.": ""},
)  # fmt: skip
# our name in `xpress_head` -> vLLM's
_XPRESS = {
    "token_embed.weight": "w1.weight", "readout.weight": "w2.weight", "mix_l": "mix.L",
    "mlp_gate.weight": "mlp.gate_proj.weight", "mlp_up.weight": "mlp.up_proj.weight",
    "mlp_down.weight": "mlp.down_proj.weight",
}  # fmt: skip
XPRESS_FLAT = Format(
    "xpress-flat", _xpress_flat, _INNER_IDS, always_aux_ids=True,
    renamed={rf"^xpress_head\.{re.escape(ours)}$": f"xpress_head.{theirs}"
             for ours, theirs in _XPRESS.items()},
)  # fmt: skip
SPECULATORS_DFLASH2, SPECULATORS_XPRESS = (
    Format(
        f"speculators-{kind}", keys, _COUNTED_LAYERS, aux_id_offset=1, always_aux_ids=True,
        renamed={r"^xpress_head\.": "refiner_head."},
    )
    for kind, keys in (("dflash2", _speculators_dflash2), ("xpress", _speculators_xpress))
)  # fmt: skip


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
    "DFlash2DraftModel": "dflash2",
    "LiLiCorrDraftModel": "lilicorr",
    "DominoDraftModel": "domino",
    "Qwen3XPressModel": "xpress",
    "XPressSpeculator": "xpress",
    BlockDraftModel.architecture: "",  # its config determines the kind
}
_KINDS = ("dflash", "dspark", "dflash2", "xpress")  # of speculators
# Tensors that only one kind of draft has, under our names.
_HEAD_TENSORS = {
    "domino_head.": "domino", "xpress_head.": "xpress", "candidate_selector.": "dflash2",
    "lilicorr.": "lilicorr", "markov_head.": "dspark",
}  # fmt: skip
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
_HEADS = {  # ModelOpt; Domino's of all trainers; speculators; vLLM; ModelOpt before it renamed them
    r"^markov_w": "markov_head.markov_w",
    r"^confidence_proj\.": "confidence_head.proj.",
    r"^(prefix_gru|embed_proj)\.": r"domino_head.\1.",
    r"^refiner_head\.": "xpress_head.",
    **{rf"^xpress_head\.{re.escape(theirs)}$": f"xpress_head.{ours}"
       for ours, theirs in _XPRESS.items()},
    r"^lilicorr\.feature_mlp\.0\.": "lilicorr.feature_norm.",
    r"^lilicorr\.feature_mlp\.1\.": "lilicorr.feature_mlp.up_proj.",
    r"^lilicorr\.feature_mlp\.3\.": "lilicorr.feature_mlp.down_proj.",
    r"^(lilicorr\.layers\.\d+\.mlp)\.0\.": r"\1.up_proj.",
    r"^(lilicorr\.layers\.\d+\.mlp)\.2\.": r"\1.down_proj.",
}  # fmt: skip


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
        if self.setting("use_swa") and not self.sliding_layers:
            yield "use_swa without layer_types: which layers have a window is not said"
        if self.setting("xpress_mlp_ratio", 2) != MLP_RATIO:
            yield f"xpress_mlp_ratio: only {MLP_RATIO} is supported"
        for key in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
            if self.setting(key) not in (None, 1, 1.0):
                yield f"{key}: our block drafts use the target's embedding and head as they are"

    def own_name(self, name: str) -> str:
        """As for other drafts; trainers have other names for the heads."""
        name = super().own_name(name)
        for theirs, ours in _HEADS.items():
            name = re.sub(theirs, ours, name)
        return name

    def spellings(self, our_name: str) -> Iterable[str]:
        layouts = (DOMINO_FLAT, XPRESS_FLAT, SPECULATORS_XPRESS)
        return [layout.tensor_name(our_name) for layout in layouts]

    @cached_property
    def layout(self) -> FileLayout:
        named = self.config.get("architectures") or []
        if SPECULATORS_KEY in self.config:
            return LAYOUTS["speculators"]
        if BlockDraftModel.architecture in named:
            return LAYOUTS["fledge"]
        if "projector_type" in self.inner:
            return LAYOUTS["specforge"]
        kind = next((_CLASSES[name] for name in named if _CLASSES.get(name)), "dflash")
        return LAYOUTS["dspark" if kind == "dspark" else "dflash"]

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

    @cached_property
    def kind(self) -> str:
        """The method, by the tensors of its head; without any by what the config says."""
        if self.spark:
            return "dspark"
        for prefix, kind in _HEAD_TENSORS.items():
            if any(name.startswith(prefix) for name in self.state):
                return kind
        named = [_CLASSES.get(name) for name in self.architectures]
        return next((kind for kind in named if kind), "dflash")

    @property
    def method(self) -> Method:
        return METHODS[self.kind]

    @property
    def sample_from_anchor(self) -> bool:
        """Whether slot 0 predicts the first token; if absent, vLLM's default."""
        default = self.spark and self.layout.name not in ("speculators", "fledge")
        if self.kind == "domino" and self.layout.name != "fledge":
            return bool(self.setting("shift_label", False))
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
        if self.layout.name == "fledge":
            return bool(self.get("sliding_both_ways", False))
        if self.setting("sliding_window_non_causal"):  # speculators'
            return bool(self.sliding_layers)
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
            **self._head_settings(),
            "confidence_head": "confidence_head.proj.weight" in self.state,
            "confidence_threshold": self.get("confidence_threshold", 0.0),
            "confidence_temperatures": list(self.get("confidence_temperatures", [])),
        }

    def _head_settings(self) -> dict[str, Any]:
        """Our keys of the head, from theirs."""
        kind, setting = self.kind, self.setting
        settings: dict[str, Any] = {
            "markov_rank": setting("markov_rank", 0) if self.spark else 0,
            "sliding_both_ways": self.slides_both_ways,
        }
        if kind in ("domino", "xpress"):
            settings["token_head"] = kind
            rank = setting("emb_dim" if kind == "domino" else "xpress_rank")
            settings["markov_rank"] = setting("markov_rank") if rank is None else rank
            settings |= self._stated("gru_hidden_dim", "pure_draft_prefix_len", "num_jacobi_passes")
            if self.layout.name != "fledge":  # what the others take a missing key for
                settings.setdefault("pure_draft_prefix_len", 0)
            if (passes := setting("xpress_num_passes")) is not None:
                settings["num_jacobi_passes"] = passes
        if kind in ("dflash2", "lilicorr"):
            settings["candidate_head"] = "selector" if kind == "dflash2" else kind
            top = setting("selector_top_k" if kind == "dflash2" else "lilicorr_candidate_topk")
            settings["candidates"] = setting("candidates", 16) if top is None else top
            lattice = (name for name in DEFAULTS if name.startswith("lilicorr_"))
            settings |= self._stated("conv_group_size", "selector_rank", *lattice)
            settings["conv_kernel_size"] = self._taps
        return settings

    def _stated(self, *names: str) -> dict[str, Any]:
        values = {name: self.setting(name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def _taps(self) -> int:
        """Of the convolutions, by their tensors."""
        kernel = self.state.get("layers.0.attention_conv.base_kernel")
        return 0 if kernel is None or kernel.ndim != 3 else kernel.shape[1]

    @property
    def default_place(self) -> AuxPlace:
        places = {"fledge": OURS, "dspark": _BESIDE, "speculators": _SPECULATORS}
        return places.get(self.layout.name, _FLAT)
