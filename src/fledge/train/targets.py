"""The target that a recipe names, with the layers that its draft listens to; or that all drafts of
one recipe do."""

from collections.abc import Sequence

import torch

from fledge.core.errors import BadInput, in_words
from fledge.recipe.schema import Recipe
from fledge.target.base import Eagle3TargetBackend
from fledge.target.heard import HeardTarget
from fledge.target.kinds import TargetSection, kind_of, target_config
from fledge.target.layers import target_depth


def listening(*recipes: Recipe) -> TargetSection:
    """The target that recipes share, with the layers that their drafts listen to if it can show
    any. A server or a cache shows those that it was made for, and says so when it is opened."""
    section = recipes[0].target
    if not kind_of(section).shows_any_layers:
        return section if len(recipes) == 1 else section.model_copy(update={"aux_layer_ids": None})
    heard = [_layers(recipe) for recipe in recipes]
    same = all(ids == heard[0] for ids in heard)
    ids = heard[0] if same else _all_of(heard, target_depth(target_config(section)))
    return section.model_copy(update={"aux_layer_ids": tuple(ids)})


def _layers(recipe: Recipe) -> list[int]:
    """Those that a recipe names, or its method's own."""
    section = recipe.target
    if section.aux_layer_ids is not None:
        return list(section.aux_layer_ids)
    count = recipe.method.aux_layers(recipe.objective)
    return recipe.method.default_layers(target_depth(target_config(section)), count)


def _all_of(heard: Sequence[Sequence[int]], depth: int) -> list[int]:
    ids = sorted({i for one in heard for i in one})
    if depth in ids:
        what = f"layer {depth}, the last hidden state, is not handed out beside others ({ids})"
        fix = "a draft that listens to it alone is trained with its like"
        raise BadInput(what, where="drafts", fix=fix)
    return ids


def make_target(recipe: Recipe, device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that a recipe names."""
    target = open_target([recipe], device)
    try:
        return heard_by(recipe, target, alone=True)
    except BadInput:
        target.close()
        raise


def open_target(recipes: Sequence[Recipe], device: torch.device) -> Eagle3TargetBackend:
    """The frozen target that recipes share: it shows what each of them listens to, or more."""
    section, first = listening(*recipes), recipes[0]
    ids = section.aux_layer_ids
    layers = first.method.aux_layers(first.objective) if ids is None else len(ids)
    return kind_of(section).open(section, device=device, aux_layers=layers)


def heard_by(recipe: Recipe, target: Eagle3TargetBackend, *, alone: bool) -> Eagle3TargetBackend:
    """The target as a recipe's draft hears it. `alone`: it is the draft's own, to be closed with
    it, and itself where it shows nothing else."""
    shown, count = list(target.aux_layer_ids), recipe.method.aux_layers(recipe.objective)
    made_for_it = recipe.target.aux_layer_ids is None and len(shown) == count
    ids = shown if made_for_it else _layers(recipe)
    if alone and ids == shown:
        return target
    if not set(ids) <= set(shown):
        what = f"the target shows layers {shown}, a draft of {recipe.method.title} "
        what += f"listens to {in_words(count)}: {ids}"
        raise BadInput(what, where="target.aux_layer_ids")
    return HeardTarget(target, ids, owner=alone)
