"""Recipes of several drafts, which are trained from one pass of the target. Imports no torch.

    run: {output_dir: runs/pair}
    drafts:
      small: {draft: {intermediate_size: 1024}}
      large: {draft: {layers: 2}, training: {lr: 5e-5}}

Each entry is an ordinary recipe: the file, with what the entry sets over it and the overrides over
both, in the directory `runs/pair/small`. What the drafts share is said once, for all of them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.recipe.layers import DRAFTS, Layer, Setting, read_layers
from fledge.recipe.schema import Recipe, merged_recipe, recipe_shapes
from fledge.recipe.shipped import recipe_file

# What a draft may have of its own, None: every key. All else decides what the target is asked, and
# when: that is one question for all.
OWN: Mapping[str, tuple[str, ...] | None] = {
    "draft": None,
    "objective": None,
    "target": ("aux_layer_ids",),
    "training": (
        "lr", "optimizer", "betas", "eps", "weight_decay", "schedule", "decay_share",
        "warmup_share", "warmup_steps", "final_lr_share", "ema", "clip", "compute_dtype",
        "gradient_checkpointing", "spike_factor", "max_bad_steps",
    ),
}  # fmt: skip
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_ONE_RUN_TRACKERS = ("wandb", "trackio")  # follow one run a process


def load_recipes(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()
) -> dict[str, Recipe]:
    """The recipes of the drafts that a file names, by name; of one that names none, itself under
    the name ''."""
    file = None if path is None else recipe_file(path)
    where = "recipe" if file is None else str(file)
    written, changes = read_layers(file, overrides, shapes=recipe_shapes())
    common = [written.sections, changes.sections]
    if not written.drafts:
        return {"": merged_recipe(common, where=where)}
    recipes = {}
    for name in written.drafts:
        if not _NAME.fullmatch(name):
            fix = "letters, digits, '_', '-' and '.': it names a directory"
            raise BadInput(f"'{name}' is no name of a draft", where=where, fix=fix)
        own = written.of(name), changes.of(name)
        for layer in own:
            _check_own(layer)
        layers = [written.sections, own[0], changes.sections, own[1]]
        recipes[name] = _placed(name, merged_recipe(layers, where=f"{where}, {DRAFTS}.{name}"))
    _check_trackers(recipes, where)
    return recipes


def _check_own(layer: Layer) -> None:
    """Refuse what the drafts share; a key that no recipe has is refused later, as everywhere."""
    for section, shape in recipe_shapes().items():
        allowed = OWN.get(section, ())
        for key, setting in layer[section].items():
            if allowed is not None and key not in allowed and key in shape.all_keys():
                raise _shared(section, key, setting)


def _shared(section: str, key: str, setting: Setting) -> BadInput:
    what = f"'{section}.{key}' is one for all drafts, which share the target's answers"
    fix = f"write it once, under '{section}' of the recipe"
    return BadInput(what, where=setting.where, fix=fix)


def _placed(name: str, recipe: Recipe) -> Recipe:
    """In a directory of its own, under a name of its own."""
    place = str(Path(recipe.run.output_dir) / name)
    called = None if recipe.run.name is None else f"{recipe.run.name}-{name}"
    run = recipe.run.model_copy(update={"output_dir": place, "name": called})
    return recipe.model_copy(update={"run": run})


def _check_trackers(recipes: Mapping[str, Recipe], where: str) -> None:
    for recipe in recipes.values():
        for tracker in recipe.tracking.trackers:
            if len(recipes) > 1 and tracker in _ONE_RUN_TRACKERS:
                what = f"tracking.trackers: {tracker} follows one run, these are {len(recipes)}"
                fix = "tracking.trackers=tensorboard, or metrics.jsonl of each"
                raise BadInput(what, where=where, fix=fix)
