"""The target that a recipe names, with the layers that its draft listens to; or that all drafts of
one recipe do."""

from collections.abc import Sequence

import torch

from fledge.core.errors import BadInput, in_words
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.kinds import TargetSection, kind_of, target_config
from fledge.target.layers import target_depth


def listening(recipe: Recipe) -> TargetSection:
    """The recipe's target with the layers that its method listens to where the recipe names none
    and it can show any."""
    section = recipe.target
    if section.aux_layer_ids is not None or not kind_of(section).shows_any_layers:
        return section
    return section.model_copy(update={"aux_layer_ids": tuple(layers_of(recipe))})


def layers_of(recipe: Recipe) -> list[int]:
    """The layers of the target that a recipe's draft listens to."""
    section = recipe.target
    if section.aux_layer_ids is not None:
        return list(section.aux_layer_ids)
    count = recipe.method.aux_layers(recipe.objective)
    return recipe.method.default_layers(target_depth(target_config(section)), count)


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names."""
    return open_target([recipe], device)


def open_target(recipes: Sequence[Recipe], device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that recipes share, with all layers that any of them listens to."""
    first = recipes[0]
    if len(recipes) > 1:
        section, layers = _showing_all(recipes)
        return kind_of(section).open(section, device=device, aux_layers=layers)
    section, layers = listening(first), first.method.aux_layers(first.objective)
    target = kind_of(section).open(section, device=device, aux_layers=layers)
    if len(target.aux_layer_ids) != layers:
        target.close()
        what = f"the target shows layers {target.aux_layer_ids}, a draft of {first.method.title} "
        what += f"listens to {in_words(layers)}"
        raise BadInput(what, where="target.aux_layer_ids")
    return target


def _showing_all(recipes: Sequence[Recipe]) -> tuple[TargetSection, int]:
    """The shared target's section with the layers of all drafts, and how many these are. What was
    made for some layers before, a server or a cache, shows those; `HeardTarget` looks."""
    section, heard = recipes[0].target, [layers_of(recipe) for recipe in recipes]
    same = all(ids == heard[0] for ids in heard)
    ids = heard[0] if same else sorted({i for ids in heard for i in ids})
    depth = target_depth(target_config(section))
    if len(ids) > 1 and depth in ids:
        what = f"layer {depth}, the last hidden state, is not handed out beside others ({ids})"
        fix = "a draft that listens to it alone is trained with its like"
        raise BadInput(what, where="drafts", fix=fix)
    shown = tuple(ids) if kind_of(section).shows_any_layers else None
    return section.model_copy(update={"aux_layer_ids": shown}), len(ids)
