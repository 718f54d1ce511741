"""Drafts and targets as verbs name them: paths, runs, and what a run knows about itself."""

import json
from pathlib import Path
from typing import Any

from fledge.errors import BadInput


def draft_of(path: Path) -> Path:
    """The directory of a draft: the path itself, or the best checkpoint of a run."""
    if (path / "config.json").is_file():
        return path
    if (path / "best" / "config.json").is_file():
        return path / "best"
    raise BadInput("neither a draft nor a run with a best checkpoint", where=str(path))


def recipe_of(path: Path) -> Any:
    """The recipe of the run that a draft belongs to, if any."""
    from fledge.train.recipe import RESOLVED_NAME, load_recipe

    here = path.absolute()
    places = [here, *list(here.parents)[:1], *list(path.resolve().parents)[:2]]
    found = next((place for place in places if (place / RESOLVED_NAME).is_file()), None)
    return None if found is None else load_recipe(found / RESOLVED_NAME)


def load_target(draft: Path, target: str, aux_layers: str, dtype: str, device: str) -> Any:
    from fledge.draft.files import CONFIG_NAME
    from fledge.target.hf import HFEagle3TargetModel

    recipe = recipe_of(draft)
    name = target or (recipe.target.model if recipe is not None else "")
    if not name:
        raise BadInput("which target?", where=str(draft), fix="give --target MODEL")
    dtype = dtype or (recipe.target.dtype if recipe is not None else "auto")
    ids = numbers(aux_layers, 3, "--aux-layers") if aux_layers else None
    if ids is None:  # what the draft says it was trained on, or its run; drafts of others do not
        ids = json.loads((draft / CONFIG_NAME).read_bytes()).get("aux_layer_ids")
    if ids is None and recipe is not None:
        ids = recipe.target.aux_layer_ids
    return HFEagle3TargetModel.from_pretrained(
        name, aux_layer_ids=ids, dtype=parse_dtype(dtype), device=device or None
    )


def parse_dtype(name: str) -> Any:
    """A torch dtype by name, or "auto"."""
    import torch

    found = "auto" if name == "auto" else getattr(torch, name, None)
    if found != "auto" and not isinstance(found, torch.dtype):
        raise BadInput(f"'{name}' is not a dtype", where="--dtype", fix="for example bfloat16")
    return found


def load_draft(path: Path, target: Any) -> Any:
    from fledge.draft.model import LlamaEagle3DraftModel

    draft = LlamaEagle3DraftModel.from_pretrained(path, dtype=target.info().dtype)
    return draft.to(target.model.device)


def numbers(text: str, count: int, where: str) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdigit() for part in parts):
        raise BadInput(f"'{text}' is not {count} numbers", where=where, fix="write them as 5,4,24")
    return [int(part) for part in parts]
