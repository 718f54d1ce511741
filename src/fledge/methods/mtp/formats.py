"""The files of native multi-token heads that engines read.

A head in a directory of its own has MiMo's layout: engines build its layer from the target's config
(sizes, rotary positions), with biases of q, k and v, and take embedding and head from the target.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from fledge.core.errors import BadInput
from fledge.formats.codec import TRAINED, Facts, Format, TargetFacts, if_set, llama_keys, zeros_for
from fledge.formats.foreign import DraftView
from fledge.formats.layouts import OURS, FileLayout, by_name
from fledge.methods.base import Method
from fledge.methods.mtp.checkpoint import in_family_order
from fledge.methods.mtp.draft import MtpDraftModel
from fledge.methods.mtp.families import MIMO, served_layer
from fledge.methods.registry import METHODS


def _mimo_keys(facts: Facts) -> dict[str, Any]:
    keys = llama_keys(facts, "qwen2") | if_set(facts, *TRAINED, "aux_layer_ids")  # the last: ours
    return keys | {"architectures": ["MiMoForCausalLM"], MIMO.count_key: 1}


_BIASES = {f"layers.0.self_attn.{name}_proj.bias": f"layers.0.self_attn.{name}_proj.weight"
           for name in "qkv"}  # fmt: skip


def _mimo_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    biases = {name: zeros_for(tensors[weight]) for name, weight in _BIASES.items()}
    return {**biases, **in_family_order(tensors, MIMO)}


MIMO_DIRECTORY = Format(
    "mimo-mtp",
    _mimo_keys,
    adapted=_mimo_tensors,
    renamed={
        rf"^{ours.replace('.', '[.]')}$": f"{MIMO.prefix}{theirs}"
        for ours, theirs in MIMO.names.items()
    }
    | {r"^layers\.0\.": MIMO.layer_prefix},
)


def refused_directory(
    config: PretrainedConfig, engine: str, target: TargetFacts
) -> BadInput | None:
    """Why an engine cannot serve a head from a directory of its own; None if it can."""
    where = f"--engine {engine}"
    if config.mtp_family != MIMO.name:
        what = "engines load such a head from its target's own files"
        return BadInput(what, where=where, fix="fledge stitch DRAFT --target MODEL --out DIR")
    if config.head_dim * config.num_attention_heads != config.hidden_size:
        what = "the class of such a head has heads of hidden_size / num_attention_heads channels"
        return BadInput(what, where=where, fix="objective.kind=eagle3 for this target")
    if target.layers is None:
        return None
    layer = served_layer(engine, target.architectures, target.layers)
    if list(config.aux_layer_ids) == [layer]:
        return None
    place = {target.layers: "after", target.layers - 1: "before"}
    what = f"for this target, {engine} hands a head the state {place[layer]} the final norm, which "
    what += f"the draft was not trained on (aux layers {list(config.aux_layer_ids)})"
    return BadInput(what, where=where, fix=f"train with target.aux_layer_ids={layer}")


# --- read -----------------------------------------------------------------------------------------

_LAYOUTS = by_name(
    FileLayout("fledge", "fledge", read_by=()),
    FileLayout("mimo-mtp", "a head in MiMo's layout, and our exports", read_by=("vllm", "sglang")),
)
_OWN_PARTS = {theirs: ours for ours, theirs in MIMO.names.items()}


class MtpView(DraftView):
    """A head's files in fledge's own terms."""

    aux_places = (OURS,)
    borrows = True
    merges = True  # fc reads a token and a state
    parallel = False
    misnamed = False

    @classmethod
    def claims(cls, config: Mapping[str, Any], names: Iterable[str]) -> bool:
        named = config.get("architectures") or []
        return "MiMoForCausalLM" in named or MtpDraftModel.architecture in named

    @cached_property
    def layout(self) -> FileLayout:
        return _LAYOUTS["mimo-mtp" if "MiMoForCausalLM" in self.architectures else "fledge"]

    @property
    def method(self) -> Method:
        return METHODS["mtp"]

    def own_name(self, name: str) -> str:
        if not name.startswith(MIMO.prefix):
            return name
        rest = name.removeprefix(MIMO.prefix)
        return _OWN_PARTS.get(rest, f"layers.0.{rest}")

    def spellings(self, our_name: str) -> Iterable[str]:
        part = MIMO.names.get(our_name, our_name.removeprefix("layers.0."))
        return () if self.layout.name == "fledge" else (MIMO.prefix + part,)

    @cached_property
    def state(self) -> dict[str, Tensor]:
        """Biases that are all zeros count as none."""
        state = dict(super().state)
        if self.layout.name == "fledge" or "fc.weight" not in state:
            return state
        if not self._biased:
            state = {name: tensor for name, tensor in state.items() if name not in _BIASES}
        return in_family_order(state, MIMO)

    @property
    def _biased(self) -> bool:
        given = (self.tensors.get(self.names.get(name, "")) for name in _BIASES)
        return any(tensor is not None and bool(tensor.any()) for tensor in given)

    @cached_property
    def layer_extras(self) -> dict[str, bool]:
        return {**super().layer_extras, "attention_bias": self._biased}

    @property
    def method_settings(self) -> dict[str, Any]:
        return {"mtp_family": self.get("mtp_family", MIMO.name)}
