"""Opens the target that a recipe names, with the aux layers that its draft, or its drafts, use."""

from collections.abc import Sequence

import torch

from fledge.core.errors import BadInput, in_words
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend, LayerView
from fledge.target.kinds import TargetSection, kind_of, target_config
from fledge.target.layers import target_depth, validate_aux_layer_ids


def shared_section(*recipes: Recipe) -> TargetSection:
    """The target section that recipes share, with the aux layers of all their drafts if the backend
    can provide any layer. A server or a cache provides fixed layers, known once it is opened."""
    section = recipes[0].target
    if not kind_of(section).shows_any_layers:
        return section if len(recipes) == 1 else section.model_copy(update={"aux_layer_ids": None})
    layers = [_layers(recipe) for recipe in recipes]
    same = all(ids == layers[0] for ids in layers)
    ids = layers[0] if same else sorted({i for draft_layers in layers for i in draft_layers})
    return section.model_copy(update={"aux_layer_ids": tuple(ids)})


def _layers(recipe: Recipe) -> list[int]:
    """The aux layers that a recipe names, or its method's defaults."""
    section, count = recipe.target, recipe.method.aux_layers(recipe.objective)
    depth = target_depth(target_config(section))
    if section.aux_layer_ids is None:
        return recipe.method.default_layers(depth, count)
    return validate_aux_layer_ids(section.aux_layer_ids, depth, count)


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names."""
    target = open_target([recipe], device)
    try:
        return view_for(recipe, target, alone=True)
    except BadInput:
        target.close()
        raise


def open_target(recipes: Sequence[Recipe], device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that recipes share: it provides the aux layers of each draft, or more."""
    section, first = shared_section(*recipes), recipes[0]
    ids = section.aux_layer_ids
    layers = first.method.aux_layers(first.objective) if ids is None else len(ids)
    return kind_of(section).open(section, device=device, aux_layers=layers)


def view_for(recipe: Recipe, target: Eagle3TargetBackend, *, alone: bool) -> Eagle3TargetBackend:
    """The target restricted to the aux layers of a recipe's draft. `alone`: no other draft uses the
    target, so it is returned as it is if its layers match, and closing the result closes it."""
    available, count = list(target.aux_layer_ids), recipe.method.aux_layers(recipe.objective)
    made_for_it = recipe.target.aux_layer_ids is None and len(available) == count
    ids = available if made_for_it else _layers(recipe)
    if alone and ids == available:
        return target
    if not set(ids) <= set(available):
        what = f"the target provides layers {available}, a draft of {recipe.method.title} "
        what += f"uses {in_words(count)}: {ids}"
        raise BadInput(what, where="target.aux_layer_ids")
    return LayerView(target, ids, owner=alone)
