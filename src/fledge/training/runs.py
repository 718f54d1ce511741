"""Finds the parts of a run: its draft, its recipe, its state.

A command accepts a run, one of its checkpoints, its `best`, or a draft that belongs to no run.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.reading import load_tensors
from fledge.methods.shared.config import trained_depths
from fledge.methods.shared.files import CONFIG_NAME, read_draft_config
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.training.checkpoint import STATE_NAME, read_state

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PROMPTS_NAME = "prompts.safetensors"
_DRAFT_TOKENS = 5  # if neither a run nor the config records how many it was trained for


def draft_directory(path: Path) -> Path:
    """The directory of a draft: the path itself, or the best checkpoint of a run."""
    for place in (path, path / "best"):
        if (place / CONFIG_NAME).is_file():
            return place
    raise BadInput("neither a draft nor a run with a best checkpoint", where=str(path))


def starting_draft(recipe: Recipe) -> Path | None:
    """The directory of the draft that a recipe starts from, if it names one."""
    start = recipe.draft.init_from
    return None if start is None else draft_directory(Path(start).expanduser())


def run_directory(path: Path) -> Path | None:
    """The run that a draft belongs to, if any."""
    absolute = path.absolute()
    candidates = [absolute, *list(absolute.parents)[:1], *list(path.resolve().parents)[:2]]
    return next((folder for folder in candidates if (folder / RESOLVED_NAME).is_file()), None)


def recipe_of(path: Path) -> Recipe | None:
    """The recipe of the run that a draft belongs to, if any."""
    run = run_directory(path)
    return None if run is None else load_recipe(run / RESOLVED_NAME)


def trained_tokens(draft: Path, config: "PretrainedConfig | None" = None) -> int:
    """The default number of tokens that a draft proposes per round, for all commands: as many as it
    was trained for, according to its run or its config."""
    recipe = recipe_of(draft)
    if recipe is not None:
        return recipe.objective.depths
    return trained_depths(config or read_draft_config(draft)) or _DRAFT_TOKENS


def trained_length(draft: Path) -> int | None:
    """The maximum length of the rows that a draft was trained on, if it belongs to a run."""
    recipe = recipe_of(draft)
    return None if recipe is None else recipe.data.max_length


def save_prompts(run: Path, digests: NDArray[np.uint64]) -> None:
    """Keep the digests of the prompts that a run is trained on (`RowView.prompts`)."""
    from safetensors.numpy import save

    with atomic_file(run / PROMPTS_NAME) as handle:
        handle.write(save({"digests": digests.view(np.int64)}))


def trained_prompts(draft: Path) -> NDArray[np.uint64] | None:
    """The digests of the prompts that a draft was trained on, if its run kept them."""
    path = (run_directory(draft) or draft) / PROMPTS_NAME
    if not path.exists():
        return None
    what = "the prompts of a run"
    tensors = load_tensors(path, what=what)
    if "digests" not in tensors:
        raise BadInput(f"not {what}", where=str(path), fix="remove the file")
    digests: NDArray[np.uint64] = tensors["digests"].numpy().astype(np.uint64)
    return digests


def checkpoint_state(draft: Path) -> dict[str, Any] | None:
    """The training state beside a draft; None if the draft is not a checkpoint."""
    return read_state(draft) if (draft / STATE_NAME).exists() else None
