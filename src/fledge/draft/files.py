"""A draft on disk: config.json and model.safetensors in the plain layout, whole or absent.

Engine-specific layouts are made from this one by `export`.
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig

from fledge.draft.rotary import rope_parameters
from fledge.errors import BadInput
from fledge.files import atomic_directory, save_tensors, write_json

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


def config_json(config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The config as engines read it: plain Llama keys, both spellings of the rotary settings."""
    values: dict[str, Any] = config.to_dict()
    for name in ("id2label", "label2id", "_name_or_path", "rope_scaling"):
        values.pop(name, None)
    rope = rope_parameters(config)
    values |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope["rope_type"] != "default":
        values["rope_scaling"] = rope  # where transformers 4 and the engines pinned to it look
    return values


def write_draft(directory: Path, config: Any, state: Mapping[str, Tensor]) -> None:
    """Write the draft; a directory of the same name is replaced as a whole."""
    with atomic_directory(directory) as temporary:
        write_draft_files(temporary, config, state)


def write_draft_files(directory: Path, config: Any, state: Mapping[str, Tensor]) -> None:
    """The same into a directory that somebody else makes whole (a training checkpoint)."""
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    write_json(directory / CONFIG_NAME, config_json(config, tensors["fc.weight"].dtype))
    save_tensors(directory / WEIGHTS_NAME, tensors, {"format": "pt"})


def read_draft(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (directory / name).is_file():
            fix = "give the directory of a draft"
            raise BadInput(f"no {name} here", where=str(directory), fix=fix)
    values = json.loads((directory / CONFIG_NAME).read_text())
    return LlamaConfig(**values), load_file(directory / WEIGHTS_NAME)


def check_tensor_names(directory: Path, *, want: Collection[str], have: Collection[str]) -> None:
    """Refuse a file that would leave a tensor random or unread."""
    missing, unknown = sorted(set(want) - set(have)), sorted(set(have) - set(want))
    if missing or unknown:
        raise BadInput(
            f"missing tensors {missing}, unknown tensors {unknown}",
            where=str(directory / WEIGHTS_NAME),
            fix="is it a draft in the plain layout?",
        )
