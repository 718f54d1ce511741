"""A run's parts: its draft, its recipe, its state, its target.

A command accepts a run, one of its checkpoints, its `best`, or a draft that belongs to no run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fledge.core.errors import BadInput
from fledge.core.files import atomic_file
from fledge.core.reading import load_tensors
from fledge.methods.registry import load_draft, method_of
from fledge.methods.shared.config import trained_depths
from fledge.methods.shared.files import CONFIG_NAME, read_config, read_draft_config
from fledge.models.shipped import shipped_directory, shipped_drafts
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.target.layers import target_depth
from fledge.training.checkpoint import STATE_NAME, read_state

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from fledge.methods.shared.draft import DraftModel
    from fledge.target.hf.model import HFEagle3TargetModel

PROMPTS_NAME = "prompts.safetensors"
_DRAFT_TOKENS = 5  # if neither a run nor the config records how many it was trained for


def draft_directory(path: Path) -> Path:
    """The directory of a draft: the path itself, the best checkpoint of a run, or the draft of that
    name that comes with fledge."""
    for place in (path, path / "best"):
        if (place / CONFIG_NAME).is_file():
            return place
    if str(path) in shipped_drafts():
        return shipped_directory(str(path))
    what, known = "neither a draft nor a run with a best checkpoint", ", ".join(shipped_drafts())
    raise BadInput(what, where=str(path), fix=f"fledge brings {known}" if known else "")


FROM_TARGET = "target"  # `draft.init_from`: the head in the target's own files


def starting_draft(recipe: Recipe) -> Path | None:
    """The directory of the draft that a recipe starts from, if it names one."""
    start = recipe.draft.init_from
    return None if start in (None, FROM_TARGET) else draft_directory(Path(start).expanduser())


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
    digests: NDArray[np.uint64] = load_tensors(path)["digests"].numpy().astype(np.uint64)
    return digests


def checkpoint_state(draft: Path) -> dict[str, Any] | None:
    """The training state beside a draft; None if the draft is not a checkpoint."""
    return read_state(draft) if (draft / STATE_NAME).exists() else None


# --- loading --------------------------------------------------------------------------------------
# What a caller leaves out is taken from the draft's run.


def load_target(
    draft: Path,
    target: str = "",
    *,
    aux_layer_ids: Sequence[int] | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
) -> "HFEagle3TargetModel":
    """Load the target of a draft; by default the one that its run names. Only the user decides
    whether remote code may run: a recipe that came with the draft must not."""
    from fledge.target.hf.model import HFEagle3TargetModel

    recipe = recipe_of(draft)
    name = target or (recipe.target.model if recipe is not None else "")
    if not name:
        raise BadInput("which target?", where=str(draft), fix="give --target MODEL")
    if dtype is None:
        dtype = "auto" if recipe is None else str(getattr(recipe.target, "dtype", "auto"))
    return HFEagle3TargetModel.from_pretrained(
        name,
        aux_layer_ids=known_layers(draft) if aux_layer_ids is None else aux_layer_ids,
        dtype=dtype,
        device=device,
        num_aux_layers=read_draft_config(draft).num_aux_hidden_states,
        trust_remote_code=trust_remote_code,
    )


def known_layers(draft: Path) -> list[int] | None:
    """The aux layers that a draft was trained on, from its config or its run; None if neither
    records them."""
    layers = read_config(draft).get("aux_layer_ids")
    recipe = recipe_of(draft) if layers is None else None
    if recipe is not None:
        layers = recipe.target.aux_layer_ids
    return list(layers) if layers else None


def with_layers_of(target: "HFEagle3TargetModel", draft: Path) -> "HFEagle3TargetModel":
    """The target with the aux layers of a draft; drafts of several methods that are used side by
    side need different ones. A draft that was made for another target gets it unchanged:
    `check_fits` then reports why they do not match."""
    config, layers = read_draft_config(draft), known_layers(draft)
    count = config.num_aux_hidden_states
    other_target = config.target_hidden_size != target.info().hidden_size
    if other_target or (layers is None and count == len(target.aux_layer_ids)):
        return target
    depth = target_depth(target.model.config)
    return target.with_layers(layers or method_of(config).default_layers(depth, count))


def check_method(draft: Path, method: str | None) -> None:
    """Raise BadInput if a draft does not support a drafting method; reads no weights."""
    from fledge.decode.strategy import choose

    config = read_draft_config(draft)
    with torch.device("meta"):  # shapes only, no weights
        choose(method_of(config).draft_type()(config), method)


def load_draft_beside(target: "HFEagle3TargetModel", path: Path) -> "DraftModel":
    """Load a draft in the target's dtype, on its device, with what it borrows from the target."""
    device = target.get_input_embeddings().weight.device
    draft = load_draft(path, dtype=target.info().dtype).to(device)
    draft.borrow_from(target)
    return draft
