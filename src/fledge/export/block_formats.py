"""What engines read from DFlash and DSpark drafts: more tables, for `formats.FORMATS`.

    dflash-flat          z-lab's layout: config.json of a Qwen3, `dflash_config`       vLLM, SGLang
    dspark-flat          DeepSpec's: the same keys beside the others, two small heads  vLLM, SGLang
    speculators-dflash   the nested config of the speculators package, ids + 1  vLLM, speculators
    speculators-dspark   the same for DSpark

All four use our tensor names, and omit embedding and head, which are the target's. A draft with a
reduced vocabulary has its own rows of the head, because no engine takes them from the target.
"""

from dataclasses import replace

from fledge.export.rules import (
    DEEP_NORMS,
    Format,
    KeyRule,
    TensorRule,
    fact_keys,
    layer_rules,
    llama_keys,
    speculators_keys,
)


def _layers() -> list[TensorRule]:
    """The tensors of the layers, which are all alike and all have q/k norms."""
    rules = [
        *layer_rules("layers.0", "layers.0", norms=DEEP_NORMS),
        *layer_rules("layers.{n}", "layers.{n}", norms=DEEP_NORMS, deep=True),
    ]
    return [
        replace(rule, feature="") if rule.feature == "q/k norms" else rule
        for rule in rules
        if rule.feature in ("", "q/k norms")
    ]


def _tensor(name: str, *shape: str) -> TensorRule:
    return TensorRule(name, name, shape)


_DFLASH_TENSORS = (
    _tensor("fc.weight", "E", "A*D"),
    _tensor("hidden_norm.weight", "E"),
    _tensor("norm.weight", "E"),
    *_layers(),
    *(
        replace(rule, feature="reduced head")
        for rule in (_tensor("lm_head.weight", "W", "E"), _tensor("d2t", "W"), _tensor("t2d", "V"))
    ),
)
_DSPARK_TENSORS = (
    *_DFLASH_TENSORS,
    _tensor("markov_head.markov_w1.weight", "V", "R"),
    _tensor("markov_head.markov_w2.weight", "W", "R"),
    replace(_tensor("confidence_head.proj.weight", "1", "E+R"), feature="confidence head"),
    replace(_tensor("confidence_head.proj.bias", "1"), feature="confidence head"),
)


def _qwen3_keys(prefix: str = "") -> list[KeyRule]:
    return [
        *llama_keys(prefix, model_type="qwen3"),
        KeyRule(f"{prefix}layer_types", "layer_types"),
        # transformers' Qwen3 drops the window unless both are set
        KeyRule(f"{prefix}use_sliding_window", value=True, feature="sliding layers"),
        KeyRule(f"{prefix}sliding_window", "sliding_window", feature="sliding layers"),
    ]


# Ours: an export in a flat layout is also a draft that `fledge eval` and `init_from` read.
_FLEDGE_KEYS = fact_keys(
    "aux_layer_ids", "num_aux_hidden_states", "qk_norm", "causal", "sliding_layers",
    "confidence_head", "confidence_threshold", "confidence_temperatures", "draft_tokens",
    need="optional",
)  # fmt: skip
_FLAT_KEYS = (
    *_qwen3_keys(),
    *fact_keys("block_size", "draft_vocab_size", "target_hidden_size", "mask_token_id"),
    *fact_keys("num_target_layers", need="optional"),
    # for all layers; without it only the sliding ones are causal
    KeyRule("is_causal", value=True, feature="causal blocks"),
    *_FLEDGE_KEYS,
)
_MARKOV_KEYS = (
    *fact_keys("markov_rank", "sample_from_anchor"),
    KeyRule("markov_head_type", value="vanilla"),
    KeyRule("enable_confidence_head", "confidence_head"),
    KeyRule("confidence_head_with_markov", "confidence_head"),
)
_SPECULATORS_KEYS = (
    *fact_keys("draft_vocab_size", "target_hidden_size", "torch_dtype"),
    *fact_keys("block_size", "mask_token_id"),
    KeyRule("tie_word_embeddings", value=False, need="optional"),
)
_SPECULATORS_LAYERS = _qwen3_keys("transformer_layer_config.")

BLOCK_FORMATS = (
    Format(
        "dflash-flat",
        _DFLASH_TENSORS,
        (
            KeyRule("architectures", value=["DFlashDraftModel"]),
            *_FLAT_KEYS,
            KeyRule("dflash_config.mask_token_id", "mask_token_id"),
        ),
        aux_ids_key="dflash_config.target_layer_ids",
        always_aux_ids=True,
    ),
    Format(
        "dspark-flat",
        _DSPARK_TENSORS,
        (KeyRule("architectures", value=["Qwen3DSparkModel"]), *_FLAT_KEYS, *_MARKOV_KEYS),
        aux_ids_key="target_layer_ids",
        always_aux_ids=True,
    ),
    Format(
        "speculators-dflash",
        _DFLASH_TENSORS,
        (
            *speculators_keys("dflash", "DFlashSpeculator", _SPECULATORS_LAYERS),
            *_SPECULATORS_KEYS,
            KeyRule("sample_from_anchor", value=False),
        ),
        aux_ids_key="aux_hidden_state_layer_ids",
        aux_id_offset=1,
        always_aux_ids=True,
    ),
    Format(
        "speculators-dspark",
        _DSPARK_TENSORS,
        (
            *speculators_keys("dspark", "DSparkSpeculator", _SPECULATORS_LAYERS),
            *_SPECULATORS_KEYS,
            *_MARKOV_KEYS,
        ),
        aux_ids_key="aux_hidden_state_layer_ids",
        aux_id_offset=1,
        always_aux_ids=True,
    ),
)
