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
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError  # raised by configs of transformers
from transformers import LlamaConfig

from fledge.core.errors import BadInput, first_line
from fledge.core.reading import Expected, Flag, ListOf, Maybe, Table, Text, Whole
from fledge.formats.codec import AUX_KEY, LAYER_KEYS, NESTED_KEY, SPECULATORS_KEY, get_path
from fledge.formats.foreign import OWN_AUX_KEY, AuxPlace, DraftView, FileLayout
from fledge.formats.import_draft import own_maps, own_values
from fledge.methods.base import Method
from fledge.methods.block.config import BlockConfig
from fledge.methods.block.draft import BlockDraftModel
from fledge.methods.block.formats import (
    DFLASH_FLAT,
    DSPARK_FLAT,
    INNER_KEY,
    SPECULATORS_DFLASH,
)
from fledge.methods.registry import METHODS
from fledge.methods.shared.config import config_keys
from fledge.methods.shared.files import CONFIG_NAME

if TYPE_CHECKING:
    from fledge.formats.checks.base import Check, Subject
    from fledge.formats.checks.probe import Answering, Probe
    from fledge.methods.shared.draft import DraftModel

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
    AuxPlace("vllm", AUX_KEY, 1),
    *(
        AuxPlace(layout.name, layout.aux_ids_key, layout.aux_id_offset)
        for layout in (DFLASH_FLAT, DSPARK_FLAT, SPECULATORS_DFLASH)
    ),
)
_OURS = AuxPlace("fledge", OWN_AUX_KEY, 0)
_HEADS = {
    "markov_w": "markov_head.markov_w",
    "confidence_proj.": "confidence_head.proj.",
}  # ModelOpt

_KEYS: dict[str, Expected] = {
    **{
        key: config_keys()[key]
        for key in ("block_size", "sliding_window", "sliding_layers", "markov_rank",
                    "confidence_threshold", "confidence_temperatures")
    },
    "mask_token_id": Maybe(Whole(0, 2**31)),
    "num_target_layers": Maybe(Whole(1, 2**16)),
    "swa_window_size": Maybe(Whole(1, 2**31)),
    "layer_types": Maybe(ListOf(Text(64), most=2**10)),
    "markov_head_type": Maybe(Text(64)),
    "projector_type": Maybe(Text(64)),
    **dict.fromkeys(
        ("is_causal", "causal", "is_neox_style", "sample_from_anchor", "confidence_head",
         "enable_confidence_head", "confidence_head_with_markov", "use_confidence_head",
         "sliding_window_non_causal", "use_swa"),
        Maybe(Flag()),
    ),
    **dict.fromkeys(
        (OWN_AUX_KEY, "target_layer_ids", "aux_hidden_state_layer_ids",
         "eagle_aux_hidden_state_layer_ids"), config_keys()["aux_layer_ids"],
    ),
}  # fmt: skip
_NESTED_TABLE = Maybe(Table(optional=_KEYS))
BLOCK_CONFIG = Table(optional={**_KEYS, INNER_KEY: _NESTED_TABLE, NESTED_KEY: _NESTED_TABLE})


# Checks of chain drafts that apply to block drafts too.
_SHARED_CHECKS = (
    "names", "vocab-size", "draft-vocab-size", "d2t-missing", "d2t-type", "d2t-absolute",
    "d2t-range", "d2t-order", "t2d-mismatch", "end-token", "dtype", "not-finite", "constant",
    "random-weights", "rope-conflict", "rope", "max-position", "tokenizer", "target-quantised",
)  # fmt: skip


class BlockView(DraftView):
    """A block draft's files in fledge's own terms."""

    expected = BLOCK_CONFIG
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

    @staticmethod
    def checks() -> "dict[str, Check]":
        from fledge.formats.checks.base import checks_in
        from fledge.methods.block import checks

        chains = DraftView.checks()
        return {name: chains[name] for name in _SHARED_CHECKS} | checks_in(checks)

    @staticmethod
    def probe(subject: "Subject", draft: "DraftModel", answering: "Answering") -> "Probe[Any]":
        from fledge.methods.block.checks import BlockProbe

        return BlockProbe(subject, draft, answering)

    @staticmethod
    def build(subject: "Subject") -> BlockDraftModel:
        """The draft as our own model, without what it borrows from its target."""
        where, view = subject.directory, subject.view
        assert isinstance(view, BlockView)
        kind = view.setting("markov_head_type", "vanilla")
        if view.spark and kind != "vanilla":
            raise BadInput(f"markov_head_type {kind}: only vanilla is supported", where=str(where))
        if view.setting("is_neox_style", True) is False:
            raise BadInput(
                "is_neox_style is false: our drafts pair halves of the channels",
                where=str(where / CONFIG_NAME),
                fix="permute the rows of q_proj and k_proj, and their norms",
            )
        if view.slides_both_ways:
            raise BadInput(
                "its sliding layers attend both ways inside a block: ours are causal there",
                where=str(where / CONFIG_NAME),
            )
        state = {name: tensor for name, tensor in view.state.items() if name not in BORROWED}
        own_maps(subject, state)
        dtype = state["fc.weight"].dtype if "fc.weight" in state else torch.float32
        config = own_block_config(subject)
        return BlockDraftModel.from_tensors(config, state, where=where, dtype=dtype).eval()

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
        if "projector_type" in self.inner:
            return LAYOUTS["specforge"]
        return LAYOUTS[next((_CLASSES[name] for name in named if _CLASSES.get(name)), "dflash")]

    @property
    def inner(self) -> dict[str, Any]:
        return self.config.get(INNER_KEY) or {}

    def setting(self, key: str, absent: Any = None) -> Any:
        """The value that engines read: from `dflash_config` if it is there, else from outside."""
        inner = self.inner.get(key)
        return self.get(key, absent) if inner is None else inner

    def path(self, key: str) -> str:
        """The dotted path of a key in the config, whether or not it is set."""
        inner = self.inner
        if key in inner or (self.layout.name == "specforge" and key in _KEYS):
            return f"{INNER_KEY}.{key}"
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
        return bool(self.setting("is_causal", self.inner.get("causal", False)))

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
        causal = self.setting("is_causal", self.inner.get("causal"))
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


# --- importing -----------------------------------------------------------------------------------
# Convert a block draft of another trainer to ours: the same weights, our config keys.


_KEPT = (*LAYER_KEYS, "rope_scaling", "partial_rotary_factor")
# Taken from the target, even if a trainer saved a copy.
BORROWED = ("embed_tokens.weight", "lm_head.weight")


def own_block_config(subject: "Subject") -> Any:
    ids = subject.aux_layer_ids or []
    values = own_values(subject, _KEPT) | {
        "target_hidden_size": int(subject.target.text.hidden_size),
        "num_aux_hidden_states": len(ids),
        **subject.view.method_settings,
        OWN_AUX_KEY: ids,
    }
    try:
        config = LlamaConfig(**values)
        BlockConfig.of(config)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        raise BadInput(first_line(error), where=str(subject.directory / CONFIG_NAME)) from None
    return config
