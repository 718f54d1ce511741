"""Recipes of several drafts that are trained from one pass of the target. Does not import torch.

    run: {output_dir: runs/pair}
    drafts:
      small: {draft: {intermediate_size: 1024}}
      large: {draft: {layers: 2}, training: {lr: 5e-5}}

Each entry is an ordinary recipe: the file, then the settings of the entry, then the overrides, each
taking precedence over the one before; its directory is `runs/pair/small`. What the drafts share is
set once for all of them.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from fledge.core.errors import BadInput
from fledge.recipe.layers import DRAFTS, Layer, Setting, read_layers
from fledge.recipe.schema import Recipe, merged_recipe, recipe_shapes
from fledge.recipe.shipped import recipe_file

# The keys that a draft may set for itself (None: all of a section). Everything else determines what
# the target is asked and when, which is the same for all drafts.
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
_ONE_RUN_TRACKERS = ("wandb", "trackio")  # support one run per process


def load_recipes(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()
) -> dict[str, Recipe]:
    """The recipes of a file's drafts, by name; a file without `drafts` gives one recipe, under the
    name ''."""
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
            raise BadInput(f"'{name}' is not a valid name for a draft", where=where, fix=fix)
        own_layers = written.of(name), changes.of(name)
        for layer in own_layers:
            _check_own(layer)
        layers = [written.sections, own_layers[0], changes.sections, own_layers[1]]
        recipes[name] = _own_run(name, merged_recipe(layers, where=f"{where}, {DRAFTS}.{name}"))
    _check_trackers(recipes, where)
    return recipes


def _check_own(layer: Layer) -> None:
    """Refuse keys that all drafts share; unknown keys are refused later, as in any recipe."""
    for section, shape in recipe_shapes().items():
        allowed = OWN.get(section, ())
        for key, setting in layer[section].items():
            if allowed is not None and key not in allowed and key in shape.all_keys():
                raise _shared_key_error(section, key, setting)


def _shared_key_error(section: str, key: str, setting: Setting) -> BadInput:
    what = f"'{section}.{key}' is one for all drafts, which share the target's answers"
    fix = f"write it once, under '{section}' of the recipe"
    return BadInput(what, where=setting.where, fix=fix)


def _own_run(name: str, recipe: Recipe) -> Recipe:
    """The recipe with a directory and a run name of its own."""
    directory = str(Path(recipe.run.output_dir) / name)
    run_name = None if recipe.run.name is None else f"{recipe.run.name}-{name}"
    run = recipe.run.model_copy(update={"output_dir": directory, "name": run_name})
    return recipe.model_copy(update={"run": run})


def _check_trackers(recipes: Mapping[str, Recipe], where: str) -> None:
    for recipe in recipes.values():
        for tracker in recipe.tracking.trackers:
            if len(recipes) > 1 and tracker in _ONE_RUN_TRACKERS:
                what = f"tracking.trackers: {tracker} follows one run, these are {len(recipes)}"
                fix = "tracking.trackers=tensorboard, or metrics.jsonl of each"
                raise BadInput(what, where=where, fix=fix)
