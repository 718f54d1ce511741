"""Block drafts (DFlash, DSpark) of any trainer, in fledge's own terms; nothing is judged here.

fledge        ours
dflash        z-lab's flat layout, and our exports: `dflash_config`
dspark        DeepSpec's flat layout, and our exports: the same keys beside the others
specforge     both, all keys in `dflash_config`, where `projector_type` tells them apart; ModelOpt's
              too, with other names for the heads of DSpark
speculators   the nested config of the speculators package; layers are counted + 1
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from fledge.core.expected import Expected, Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.diagnosis.foreign import AuxPlace, DraftView
from fledge.diagnosis.layouts import NESTED_KEY, OWN_AUX_KEY, SPECULATORS_KEY, FileLayout
from fledge.draft.block import BlockDraftModel
from fledge.export.formats import get_path
from fledge.methods.base import Method
from fledge.methods.registry import METHODS

INNER = "dflash_config"
_CLASSES = {
    "DFlashDraftModel": "dflash",
    "DFlashSpeculator": "dflash",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DSparkSpeculator": "dspark",
    BlockDraftModel.architecture: "",  # its config determines the kind
}
_KINDS = ("dflash", "dspark")
_SPECULATORS_BESIDE = frozenset({
    "draft_vocab_size", "target_hidden_size", "mask_token_id", "block_size", "sample_from_anchor",
    "aux_hidden_state_layer_ids", "sliding_window_non_causal", "markov_rank", "markov_head_type",
    "enable_confidence_head", "confidence_head_with_markov", "torch_dtype", "dtype",
})  # fmt: skip
LAYOUTS = {
    layout.name: layout
    for layout in (
        FileLayout("fledge", "fledge"),
        FileLayout("dflash", "z-lab, and our exports of DFlash"),
        FileLayout("dspark", "DeepSpec, and our exports of DSpark"),
        FileLayout("specforge", "SpecForge or ModelOpt"),
        FileLayout("speculators", "speculators", nested=NESTED_KEY, beside=_SPECULATORS_BESIDE),
    )
}
AUX_PLACES = (
    AuxPlace("vllm", "eagle_aux_hidden_state_layer_ids", 1),
    AuxPlace("flat", f"{INNER}.target_layer_ids", 0),
    AuxPlace("beside", "target_layer_ids", 0),
    AuxPlace("speculators", "aux_hidden_state_layer_ids", 1),
)
_OURS = AuxPlace("fledge", OWN_AUX_KEY, 0)
_HEADS = {
    "markov_w": "markov_head.markov_w",
    "confidence_proj.": "confidence_head.proj.",
}  # ModelOpt

_IDS = Maybe(ListOf(Whole(0, 2**16), most=2**10))
_KEYS: dict[str, Expected] = {
    "block_size": Maybe(Whole(1, 2**10)),
    "mask_token_id": Maybe(Whole(0, 2**31)),
    "num_target_layers": Maybe(Whole(1, 2**16)),
    "sliding_window": Maybe(Whole(1, 2**31)),
    "swa_window_size": Maybe(Whole(1, 2**31)),
    "sliding_layers": Maybe(ListOf(Whole(0, 2**10), most=2**10)),
    "layer_types": Maybe(ListOf(Text(64), most=2**10)),
    "markov_rank": Maybe(Whole(0, 2**14)),
    "markov_head_type": Maybe(Text(64)),
    "projector_type": Maybe(Text(64)),
    "confidence_threshold": Maybe(Number(0, 1)),
    "confidence_temperatures": Maybe(ListOf(Number(1e-6, 1e6), most=2**10)),
    **dict.fromkeys(
        ("is_causal", "causal", "is_neox_style", "sample_from_anchor", "confidence_head",
         "enable_confidence_head", "confidence_head_with_markov", "use_confidence_head",
         "sliding_window_non_causal", "use_swa"),
        Maybe(Flag()),
    ),
    **dict.fromkeys(
        (OWN_AUX_KEY, "target_layer_ids", "aux_hidden_state_layer_ids",
         "eagle_aux_hidden_state_layer_ids"), _IDS,
    ),
}  # fmt: skip
_NESTED_TABLE = Maybe(Table(optional=_KEYS))
BLOCK_CONFIG = Table(optional={**_KEYS, INNER: _NESTED_TABLE, NESTED_KEY: _NESTED_TABLE})


def is_block_draft(config: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether it is a block draft, by its class or by the norm after fc that no other kind has."""
    named = config.get("architectures") or []
    if config.get(SPECULATORS_KEY) in _KINDS or not _CLASSES.keys().isdisjoint(named):
        return True
    has_block_size = "block_size" in config or "block_size" in (config.get(INNER) or {})
    return has_block_size and any(
        name.removeprefix("model.") == "hidden_norm.weight" for name in names
    )


class BlockView(DraftView):
    """A block draft's files in fledge's own terms."""

    expected = BLOCK_CONFIG
    merges = False  # only EAGLE-1 does
    parallel = False  # only P-EAGLE is
    misnamed = False

    def own_name(self, name: str) -> str:
        """As for other drafts; older drafts of SpecForge have their heads under `logit_head`."""
        name = super().own_name(name).removeprefix("logit_head.")
        theirs = next((prefix for prefix in _HEADS if name.startswith(prefix)), None)
        return name if theirs is None else _HEADS[theirs] + name.removeprefix(theirs)

    @cached_property
    def layout(self) -> FileLayout:
        named = self.config.get("architectures") or []
        if SPECULATORS_KEY in self.config:
            return LAYOUTS["speculators"]
        if BlockDraftModel.architecture in named:
            return LAYOUTS["fledge"]
        if "projector_type" in (self.config.get(INNER) or {}):
            return LAYOUTS["specforge"]
        return LAYOUTS[next((_CLASSES[name] for name in named if _CLASSES.get(name)), "dflash")]

    def setting(self, key: str, absent: Any = None) -> Any:
        """The value that engines read: from `dflash_config` if it is there, else from outside."""
        inner = (self.config.get(INNER) or {}).get(key)
        return self.get(key, absent) if inner is None else inner

    def path(self, key: str) -> str:
        """The dotted path of a key in the config, whether or not it is set."""
        inner = self.config.get(INNER) or {}
        if key in inner or (self.layout.name == "specforge" and key in _KEYS):
            return f"{INNER}.{key}"
        return super().path(key)

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
    def causal(self) -> bool:
        if self.layout.name == "fledge":
            return bool(self.get("causal", False))
        return bool(self.setting("is_causal", (self.config.get(INNER) or {}).get("causal", False)))

    @property
    def sliding_layers(self) -> list[int]:
        if self.layout.name == "fledge":
            return list(self.get("sliding_layers", []))
        kinds = self.setting("layer_types", [])
        sliding = [i for i, kind in enumerate(kinds) if kind == "sliding_attention"]
        return self.layer_numbers if self.setting("use_swa", False) and not sliding else sliding

    @property
    def slides_both_ways(self) -> bool:
        """Whether engines let the slots of sliding layers attend to later slots of their block."""
        if self.layout.name == "fledge" or not self.sliding_layers:
            return False
        causal = self.setting("is_causal", (self.config.get(INNER) or {}).get("causal"))
        if causal is None:  # layers that are called sliding are causal, those of `use_swa` are not
            causal = "sliding_attention" in self.setting("layer_types", [])
        return not causal

    @property
    def confidence_head(self) -> bool:
        return "confidence_head.proj.weight" in self.state

    @property
    def declares_confidence(self) -> bool:
        return bool(
            self.setting("enable_confidence_head", self.setting("use_confidence_head", False))
        )

    @property
    def first_place(self) -> int:
        return 0 if self.sample_from_anchor else 1

    @property
    def method_settings(self) -> dict[str, Any]:
        sliding = self.sliding_layers
        window = self.setting("swa_window_size", self.setting("sliding_window"))
        return {
            "block_size": self.setting("block_size"),
            "mask_token_id": self.mask_token_id,
            "sample_from_anchor": self.sample_from_anchor,
            "causal": self.causal,
            "sliding_layers": sliding,
            "sliding_window": window if sliding else None,
            "markov_rank": self.setting("markov_rank", 0) if self.spark else 0,
            "confidence_head": self.confidence_head,
            "confidence_threshold": self.get("confidence_threshold", 0.0),
            "confidence_temperatures": list(self.get("confidence_temperatures", [])),
        }

    # --- aux layers -------------------------------------------------------------------------------

    @property
    def written_aux(self) -> list[AuxPlace]:
        if self.layout.name == "fledge":
            return [_OURS] if OWN_AUX_KEY in self.config else []
        present = [place for place in AUX_PLACES if get_path(self.config, place.path) is not None]
        return present + ([_OURS] if present and OWN_AUX_KEY in self.config else [])

    @property
    def aux_place(self) -> AuxPlace:
        if written := self.written_aux:
            return written[0]
        flat, beside, speculators = AUX_PLACES[1:]
        default_places = {"fledge": _OURS, "dspark": beside, "speculators": speculators}
        return default_places.get(self.layout.name, flat)
