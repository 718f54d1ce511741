"""Load recipes, targets and drafts from what a verb is given: command-line words, paths, or the
record that a run keeps of itself."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fledge.cli.console import err
from fledge.core.errors import BadInput
from fledge.train.loading import check_method as check_method
from fledge.train.loading import load_draft_beside as load_draft_beside

WAITING = "waiting for another process, which prepares this data"


def recipe_of_words(words: Sequence[str]) -> Any:
    """The recipe that a file and `section.key=value` overrides describe."""
    from fledge.recipe.schema import load_recipe, split_arguments

    return load_recipe(*split_arguments(words))


def recipes_of_words(words: Sequence[str]) -> Any:
    """The recipes by draft name; the recipe of a single draft has the name ''."""
    from fledge.recipe.drafts import load_recipes
    from fledge.recipe.schema import split_arguments

    return load_recipes(*split_arguments(words))


def show_set_up(update: Callable[..., None]) -> Callable[[Any], None]:
    """Shows on a bar how far a run is set up: first its data, part by part, then its target."""

    def show(at: Any) -> None:
        if at.waiting:
            rank = os.environ.get("RANK")
            rank_prefix = "" if rank is None else f"rank {rank}: "
            err.say(f"{rank_prefix}{WAITING}")  # from every rank, so that none seems to hang
            update(description=WAITING)
            return
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
    """`train.loading.load_target` with options as typed on the command line."""
    from fledge.draft.files import read_draft_config
    from fledge.train import loading

    count = read_draft_config(draft).num_aux_hidden_states
    return loading.load_target(
        draft,
        target,
        aux_layer_ids=numbers(aux_layers, count, "--aux-layers") if aux_layers else None,
        dtype=parse_dtype(dtype) if dtype else None,
        device=device or None,
        trust_remote_code=trust_remote_code,
    )


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
