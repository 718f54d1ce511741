"""Find the parts of a run: its draft, its recipe, its state.

A verb may be given a run, one of its checkpoints, its `best`, or a draft that belongs to no run.
"""

from pathlib import Path
from typing import Any

from fledge.core.errors import BadInput
from fledge.draft.config import trained_depths
from fledge.draft.files import CONFIG_NAME, read_draft_config
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.train.checkpoint import STATE_NAME, data_fingerprint, read_state

_DRAFT_TOKENS = 5  # where neither a run nor the config says how many it was trained for
_HELD_OUT_BEFORE = 512  # the default of `data.valid_rows` in recipes that runs wrote down


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
    here = path.absolute()
    places = [here, *list(here.parents)[:1], *list(path.resolve().parents)[:2]]
    return next((place for place in places if (place / RESOLVED_NAME).is_file()), None)


def recipe_of(path: Path) -> Recipe | None:
    """The recipe of the run that a draft belongs to, if any."""
    run = run_directory(path)
    return None if run is None else load_recipe(run / RESOLVED_NAME)


def trained_tokens(draft: Path, config: Any = None) -> int:
    """How many tokens a draft proposes per round unless told otherwise: as many as it was trained
    for, by its run or its config. Every verb asks here."""
    recipe = recipe_of(draft)
    if recipe is not None:
        return recipe.objective.depths
    return trained_depths(config or read_draft_config(draft)) or _DRAFT_TOKENS


def trained_length(draft: Path) -> int | None:
    """The longest row that a draft may have learnt from, if its run says."""
    recipe = recipe_of(draft)
    return None if recipe is None else recipe.data.max_length


def as_begun(recipe: Recipe) -> Recipe:
    """The recipe, with the number of held-out rows that the run in its place was begun with: before
    it could be left out, it was written down as 512."""
    if recipe.data.valid_rows is None and _held_out_before(recipe) == _HELD_OUT_BEFORE:
        data = recipe.data.model_copy(update={"valid_rows": _HELD_OUT_BEFORE})
        return recipe.model_copy(update={"data": data})
    return recipe


def keeps_its_rows(recipe: Recipe) -> bool:
    """Whether a run was begun with the recipe's number of held-out rows, however many there are."""
    asked = recipe.data.valid_rows
    return asked is not None and asked == _held_out_before(recipe)


def rows_begun_with(recipe: Recipe) -> list[str]:
    """Fingerprints of the rows, training and held-out ones, that the run in the recipe's place goes
    on with; none: it has not come as far as a checkpoint."""
    return data_fingerprint(Path(recipe.run.output_dir)).split("+")


def _held_out_before(recipe: Recipe) -> int | None:
    written = Path(recipe.run.output_dir) / RESOLVED_NAME
    return load_recipe(written).data.valid_rows if written.is_file() else None


def checkpoint_state(draft: Path) -> dict[str, Any] | None:
    """What training wrote beside a checkpoint's draft, if it is one."""
    return read_state(draft) if (draft / STATE_NAME).exists() else None
