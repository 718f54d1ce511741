"""Recipes, targets and drafts loaded as verbs name them: by words, by path, or by what a run knows
about itself."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput


def recipe_of_words(words: Sequence[str]) -> Any:
    """The recipe that a file and `section.key=value` overrides describe."""
    from fledge.recipe.schema import load_recipe, split_arguments

    return load_recipe(*split_arguments(words))


def show_set_up(update: Callable[..., None]) -> Callable[[Any], None]:
    """What a bar says while a run is set up: first its data, part by part, then its target."""

    def show(at: Any) -> None:
        what = "preparing data" if at.done < at.parts else "loading the target"
        update(description=what, total=at.parts, completed=at.done)

    return show


def load_target(
    draft: Path,
    target: str = "",
    aux_layers: str = "",
    dtype: str = "",
    device: str = "",
    trust_remote_code: bool = False,
) -> Any:
    """The target of a draft. Its run may know it; whether its code may run is the user's to say:
    a recipe that came with the draft does not speak for them."""
    from fledge.draft.files import read_config, read_draft_config
    from fledge.target.hf.model import HFEagle3TargetModel
    from fledge.train.runs import recipe_of

    recipe = recipe_of(draft)
    name = target or (recipe.target.model if recipe is not None else "")
    if not name:
        raise BadInput("which target?", where=str(draft), fix="give --target MODEL")
    dtype = dtype or (getattr(recipe.target, "dtype", "auto") if recipe is not None else "auto")
    count = read_draft_config(draft).num_aux_hidden_states
    ids = numbers(aux_layers, count, "--aux-layers") if aux_layers else None
    if ids is None:  # what the draft says it was trained on, or its run; drafts of others do not
        ids = read_config(draft).get("aux_layer_ids")
    if ids is None and recipe is not None:
        ids = list(recipe.target.aux_layer_ids or ()) or None
    return HFEagle3TargetModel.from_pretrained(
        name,
        aux_layer_ids=ids,
        dtype=parse_dtype(dtype),
        device=device or None,
        num_aux_layers=count,
        trust_remote_code=trust_remote_code,
    )


def check_method(draft: Path, method: str | None) -> None:
    """Refuse a way of drafting that a draft does not have before any weights are read."""
    import torch

    from fledge.decode.strategies.registry import choose
    from fledge.draft.files import read_draft_config
    from fledge.methods.registry import method_of

    config = read_draft_config(draft)
    with torch.device("meta"):  # its shape without its weights
        choose(method_of(config).draft_type()(config), method)


def parse_dtype(name: str, *, floating: bool = False) -> Any:
    """A torch dtype by name, or "auto"."""
    import torch

    if name == "auto" and not floating:
        return name
    dtype = getattr(torch, name, None)
    if isinstance(dtype, torch.dtype) and (dtype.is_floating_point or not floating):
        return dtype
    raise BadInput(f"'{name}' is not a dtype", where="--dtype", fix="for example bfloat16")


def load_draft_beside(target: Any, path: Path) -> Any:
    """A draft in the target's precision, on its device, with what it borrows from the target."""
    from fledge.methods.registry import load_draft

    draft = load_draft(path, dtype=target.info().dtype).to(target.model.device)
    draft.borrow_from(target)
    return draft


def numbers(text: str, count: int, where: str) -> list[int]:
    parts = text.split(",")
    if len(parts) != count or not all(part.strip().isdigit() for part in parts):
        raise BadInput(f"'{text}' is not {count} numbers", where=where, fix="write them as 5,4,24")
    return [int(part) for part in parts]
