"""What engines read from DFlash and DSpark drafts; the part of `formats.codec` that is theirs.

    dflash-flat          z-lab's layout: config.json of a Qwen3, `dflash_config`       vLLM, SGLang
    dspark-flat          DeepSpec's: the same keys beside the others, two small heads  vLLM, SGLang
    speculators-dflash   the nested config of the speculators package, ids + 1  vLLM, speculators
    speculators-dspark   the same for DSpark

All four use our tensor names, and omit embedding and head, which are the target's. A draft with a
reduced vocabulary has its own rows of the head, because no engine takes them from the target.
"""

from typing import Any

from fledge.formats.codec import (
    INNER_KEY,
    Facts,
    Format,
    if_set,
    llama_keys,
    speculators_keys,
    taken,
)
from fledge.methods.shared.config import PLACEHOLDER_KEY


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
