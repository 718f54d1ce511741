"""Loads targets and drafts; what a caller leaves out is taken from the draft's run.

Heavy modules are imported only when they are needed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput

if TYPE_CHECKING:
    import torch

    from fledge.methods.shared.draft import DraftModel
    from fledge.target.hf.model import HFEagle3TargetModel


def load_target(
    draft: Path,
    target: str = "",
    *,
    aux_layer_ids: Sequence[int] | None = None,
    dtype: "torch.dtype | str | None" = None,
    device: "torch.device | str | None" = None,
    trust_remote_code: bool = False,
) -> "HFEagle3TargetModel":
    """Load the target of a draft; by default the one that its run names. Only the user decides
    whether remote code may run: a recipe that came with the draft must not."""
    from fledge.methods.shared.files import read_draft_config
    from fledge.target.hf.model import HFEagle3TargetModel
    from fledge.training.runs import recipe_of

    recipe = recipe_of(draft)
    name = target or (recipe.target.model if recipe is not None else "")
    if not name:
        raise BadInput("which target?", where=str(draft), fix="give --target MODEL")
    if dtype is None:
        dtype = str(getattr(recipe.target, "dtype", "auto")) if recipe is not None else "auto"
    if aux_layer_ids is None:
        aux_layer_ids = known_layers(draft)
    return HFEagle3TargetModel.from_pretrained(
        name,
        aux_layer_ids=aux_layer_ids,
        dtype=dtype,
        device=device,
        num_aux_layers=read_draft_config(draft).num_aux_hidden_states,
        trust_remote_code=trust_remote_code,
    )


def known_layers(draft: Path) -> list[int] | None:
    """The aux layers that a draft was trained on, from its config or its run; None if neither
    records them."""
    from fledge.methods.shared.files import read_config
    from fledge.training.runs import recipe_of

    layers = read_config(draft).get("aux_layer_ids")
    recipe = recipe_of(draft) if layers is None else None
    if recipe is not None:
        layers = recipe.target.aux_layer_ids
    return list(layers) if layers else None


def with_layers_of(target: "HFEagle3TargetModel", draft: Path) -> "HFEagle3TargetModel":
    """The target with the aux layers of a draft; drafts of several methods that are used side by
    side need different ones. A draft that was made for another target gets it unchanged:
    `check_fits` then reports why they do not match."""
    from fledge.methods.registry import method_of
    from fledge.methods.shared.files import read_draft_config
    from fledge.target.layers import target_depth

    config, layers = read_draft_config(draft), known_layers(draft)
    if config.target_hidden_size != target.info().hidden_size:
        return target
    count = config.num_aux_hidden_states
    if layers is None and count == len(target.aux_layer_ids):
        return target
    depth = target_depth(target.model.config)
    return target.with_layers(layers or method_of(config).default_layers(depth, count))


def check_method(draft: Path, method: str | None) -> None:
    """Raise BadInput if a draft does not support a drafting method; reads no weights."""
    import torch

    from fledge.decode.strategy import choose
    from fledge.methods.registry import method_of
    from fledge.methods.shared.files import read_draft_config

    config = read_draft_config(draft)
    with torch.device("meta"):  # shapes only, no weights
        choose(method_of(config).draft_type()(config), method)


def load_draft_beside(target: "HFEagle3TargetModel", path: Path) -> "DraftModel":
    """Load a draft in the target's dtype, on its device, with what it borrows from the target."""
    from fledge.methods.registry import load_draft

    device = target.get_input_embeddings().weight.device
    draft = load_draft(path, dtype=target.info().dtype).to(device)
    draft.borrow_from(target)
    return draft
