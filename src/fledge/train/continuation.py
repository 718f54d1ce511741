"""Whether a recipe may be trained where it wants to be: in an empty place, or as its own run.

The command line asks before torch is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.core.files import check_place

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe

# Fields that may differ between a run and its continuation: they do not touch the arithmetic, or
# (`record_steps`) its last digits only. Data and target may lie elsewhere: what they hold is
# checked by fingerprint. A step may be cut into other pieces for other ranks: `fit` looks that it
# stays the same one.
_FREE = (
    "run.", "data.train:", "data.valid:", "target.model:", "tracking.", "checkpoint.",
    "evaluation.every_steps", "data.workers", "training.prefetch", "training.device",
    "target.device", "training.extend", "training.max_bad_steps", "target.urls",
    "target.token_env", "target.ca_file", "target.prefetch", "target.timeout_s", "target.retries",
    "target.wait_s", "target.shared_memory", "training.shard", "training.context",
    "training.micro_batch", "training.accumulate", "target.address", "target.workers",
    "target.worker_cpus", "target.worker_gpus", "target.placement", "target.url:",
    "target.shared_dir", "training.record_steps",
)  # fmt: skip


def check_existing(recipe: "Recipe", *, one_of_several: bool = False) -> None:
    """Refuse to continue a run with a recipe that is not its own; and, for one of several drafts,
    to put it into somebody else's."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe
    from fledge.train.checkpoint import newest_checkpoint
    from fledge.train.lengthening import LENGTH, ways_on
    from fledge.train.runs import as_begun

    directory = Path(recipe.run.output_dir)
    if one_of_several and (directory.parent / RESOLVED_NAME).exists():
        what, fix = "the run of one draft is here, not of several", "run.output_dir=..."
        raise BadInput(what, where=str(directory.parent), fix=fix)
    check_place(directory, directory=True)
    resolved = directory / RESOLVED_NAME
    if not resolved.exists():
        # hidden: what a command that was killed at its very beginning left
        if directory.is_dir() and any(not p.name.startswith(".") for p in directory.iterdir()):
            what, fix = "not empty, and not a run of fledge", "run.output_dir=..."
            raise BadInput(what, where=str(directory), fix=fix)
        return
    if not recipe.checkpoint.resume:
        what = "a run is here already, and checkpoint.resume is false"
        raise BadInput(what, where=str(directory), fix="give another run.output_dir")
    differing = load_recipe(resolved).differences(as_begun(recipe))
    differing = [line for line in differing if not line.startswith(_FREE)]
    if differing and all(line.startswith(LENGTH) for line in differing):
        if recipe.training.extend:  # `fit` looks how far the run is
            return
        newest, _ = newest_checkpoint(directory)
        if newest is not None and newest.finished:
            what = f"this run finished at step {newest.step} ({'; '.join(differing)})"
            raise BadInput(what, where=str(directory), fix=ways_on(directory))
    if differing:
        what = f"this run was started with another recipe: {'; '.join(differing[:5])}"
        fix = "give it another run.output_dir, or the recipe it was started with"
        raise BadInput(what, where=str(directory), fix=fix)
