"""Arguments for SGLang's `ServerArgs`: our defaults, the user's, and those that capture needs."""

from collections.abc import Sequence
from typing import Any

import torch

from fledge.core.errors import BadInput, nearest
from fledge.target.cache.format import DTYPES
from fledge.target.sglang.engine import installed_version

# Capture depends on these; any other value is rejected.
_FIXED: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_return_hidden_states": True,
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "disable_overlap_schedule": True,
    "speculative_algorithm": None,
    "pp_size": 1,
    "dp_size": 1,
}
# SGLang's public capture returns aux states *in place of* the last hidden state, which a draft
# needs too; one engine cannot return both, and they would come as lists of numbers.
_PUBLIC_CAPTURE = ("enable_return_aux_hidden_states", "return_aux_hidden_state_layer_ids")
# SGLang would fill the whole GPU with its KV pool; a target needs memory for one batch only, and a
# larger batch is run in parts.
_DEFAULTS: dict[str, Any] = {"max_total_tokens": 65536, "tp_size": 1, "log_level": "error"}
_ON_CPU: dict[str, Any] = {
    "max_total_tokens": 8192,
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
}


def server_options(asked: dict[str, Any], names: Sequence[str], *, device: str) -> dict[str, Any]:
    """Arguments for `ServerArgs`: our defaults, the user's, and those that capture needs."""
    for name, value in asked.items():
        if name in _PUBLIC_CAPTURE and value:
            raise BadInput(
                f"{name}: SGLang then returns aux states in place of the last hidden state, and "
                "drafts learn from both",
                where="engine_args",
                fix="leave it out: both are taken inside SGLang (target.aux_layer_ids names them)",
            )
        if name not in names:
            raise BadInput(
                f"SGLang {installed_version()} has no argument '{name}'",
                where="engine_args",
                fix=nearest(name, list(names)),
            )
        if name in _FIXED and value != _FIXED[name]:
            raise BadInput(
                f"{name}={value!r} does not go with hidden-state capture",
                where="engine_args",
                fix=f"leave it out (it is {_FIXED[name]!r})",
            )
    kind, _, index = device.partition(":")
    return {
        **_DEFAULTS,
        **(_ON_CPU if kind == "cpu" else {}),
        **({"base_gpu_id": int(index)} if index else {}),
        **asked,
        **_FIXED,
        "device": kind,
    }


def sglang_dtype(dtype: torch.dtype | str | None) -> str:
    """The name of a dtype that SGLang expects: it compares strings, and would ignore a
    `torch.dtype`."""
    name = "auto" if dtype is None else str(dtype).removeprefix("torch.")
    if name not in ("auto", *DTYPES):
        raise BadInput(
            f"SGLang cannot run in {dtype}",
            where="dtype",
            fix=f"one of auto, {', '.join(DTYPES)} (fp8: engine argument quantization)",
        )
    return name
