"""Finds the parts of a run: its draft, its recipe, its state.

A command accepts a run, one of its checkpoints, its `best`, or a draft that belongs to no run.
"""

from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.draft.config import trained_depths
from fledge.draft.files import CONFIG_NAME, read_draft_config
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.train.checkpoint import STATE_NAME, data_fingerprint, read_state

_DRAFT_TOKENS = 5  # if neither a run nor the config records how many it was trained for
_OLD_DEFAULT = 512  # of `data.valid_rows`; older versions wrote it into the recipes of their runs


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


def trained_tokens(draft: Path, config: Any = None) -> int:
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


def as_begun(recipe: Recipe) -> Recipe:
    """The recipe with the number of held-out rows that its existing run was started with. Older
    versions, which had no None there, wrote the default of 512 into the run's recipe."""
    if recipe.data.valid_rows is None and _valid_rows_of_run(recipe) == _OLD_DEFAULT:
        data = recipe.data.model_copy(update={"valid_rows": _OLD_DEFAULT})
        return recipe.model_copy(update={"data": data})
    return recipe


def keeps_its_rows(recipe: Recipe) -> bool:
    """Whether the recipe's existing run was started with the same explicit `data.valid_rows`."""
    valid_rows = recipe.data.valid_rows
    return valid_rows is not None and valid_rows == _valid_rows_of_run(recipe)


def rows_begun_with(recipe: Recipe) -> list[str]:
    """Fingerprints of the training and held-out rows of the recipe's existing run, which it must
    continue with; [""] if there is no checkpoint yet."""
    return data_fingerprint(Path(recipe.run.output_dir)).split("+")


def _valid_rows_of_run(recipe: Recipe) -> int | None:
    resolved = Path(recipe.run.output_dir) / RESOLVED_NAME
    return load_recipe(resolved).data.valid_rows if resolved.is_file() else None


def checkpoint_state(draft: Path) -> dict[str, Any] | None:
    """The training state beside a draft; None if the draft is not a checkpoint."""
    return read_state(draft) if (draft / STATE_NAME).exists() else None
