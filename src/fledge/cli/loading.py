"""Load recipes, targets and drafts from what a verb is given: command-line words, paths, or the
record that a run keeps of itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput


def recipe_of_words(words: Sequence[str]) -> Any:
    """The recipe that a file and `section.key=value` overrides describe."""
    from fledge.recipe.schema import load_recipe, split_arguments

    return load_recipe(*split_arguments(words))


def target_options(
    draft: Path, aux_layers: str, dtype: str, device: str, trust_remote_code: bool
) -> dict[str, Any]:
    """How to load the target of a draft, from options as typed on the command line."""
    from fledge.methods.shared.files import read_draft_config

    layers = None
    if aux_layers:
        count = read_draft_config(draft).num_aux_hidden_states
        layers = numbers(aux_layers, count, "--aux-layers")
    return {
        "aux_layer_ids": layers,
        "dtype": parse_dtype(dtype) if dtype else None,
        "device": device or None,
        "trust_remote_code": trust_remote_code,
    }


def parse_dtype(name: str, *, floating: bool = False) -> Any:
    """The torch dtype of this name, or "auto"."""
    import torch

    if name == "auto" and not floating:
        return name
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or not floating):
        return dtype
    raise BadInput(f"'{name}' is not a dtype", where="--dtype", fix="for example bfloat16")


def numbers(text: str, count: int, where: str) -> list[int]:
    """Parse exactly `count` comma-separated integers."""
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdigit() for part in parts):
        raise BadInput(f"'{text}' is not {count} numbers", where=where, fix="write them as 5,4,24")
    return [int(part) for part in parts]
