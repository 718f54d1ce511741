"""The config keys that are read from a foreign draft, and their permitted values."""

from fledge.core.expected import Expected, Flag, ListOf, Maybe, Number, Table, Text, Whole
from fledge.diagnosis.layouts import NESTED_KEY

# Flags for a bias of fc: ours, SafeAILab's, vLLM's.
BIAS_KEYS = ("fc_bias", "bias", "eagle_fc_bias")
# In all of the following, null counts as absent.
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size",
    "max_position_embeddings", "num_aux_hidden_states", "num_depths", "ttt_steps", "draft_tokens",
    "eagle_version",
)  # fmt: skip
_FACTORS = ("rms_norm_eps", "initializer_range", "rope_theta", "factor", "partial_rotary_factor")
_SHARES = ("down_sample_ratio", "down_sample_ratio_min")
_FLAGS = (
    "fc_norm", "norm_output", "norm_before_residual", "norm_before_fc", "attention_bias",
    "mlp_bias", "qk_norm", "parallel_drafting", "tie_word_embeddings", *BIAS_KEYS,
)  # fmt: skip
_STRINGS = ("hidden_act", "model_type", "rope_type", "type")
_PLAIN: dict[str, Expected] = {
    **dict.fromkeys(_SIZES, Maybe(Whole(1, 2**40))),
    **dict.fromkeys(_FACTORS, Maybe(Number(1e-300))),
    **dict.fromkeys(_SHARES, Maybe(Number(0, 1))),
    **dict.fromkeys(_FLAGS, Maybe(Flag())),
    **dict.fromkeys(_STRINGS, Maybe(Text(256))),
    "architectures": Maybe(ListOf(Text(256))),
}
_ROTARY = ("rope_parameters", "rope_scaling")
_NESTED = (NESTED_KEY, "speculators_config", "eagle_config", "dflash_config")


def _config(depth: int) -> Table:
    """The schema of a config with `depth` levels of nested configs."""
    inner = _config(depth - 1) if depth else Table(optional=_PLAIN)
    return Table(optional={**_PLAIN, **dict.fromkeys((*_NESTED, *_ROTARY), Maybe(inner))})


CONFIG = _config(3)
CONFIG_KEYS = {*_PLAIN, *_ROTARY, *_NESTED}
