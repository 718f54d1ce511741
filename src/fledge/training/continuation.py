"""Continuing a run: whether an output directory holds a run of the recipe, and longer runs.

The command line checks the directory before torch is loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.core.files import check_place

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe
    from fledge.training.checkpoint import Checkpoint
    from fledge.training.setup import Training


# Fields that may differ between a run and its continuation: they do not affect the arithmetic, or
# (`record_steps`) only its last digits. Data and target may have moved: their contents are checked
# by fingerprint. A step may be split differently over ranks: `fit` checks that it stays the same.
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
    """Raise BadInput if the output directory holds a run of another recipe, or other files; and,
    for one of several drafts, if its parent directory is the run of a single draft."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe
    from fledge.training.checkpoint import newest_checkpoint

    directory = Path(recipe.run.output_dir)
    if one_of_several and (directory.parent / RESOLVED_NAME).exists():
        what, fix = "holds the run of one draft, not of several", "run.output_dir=..."
        raise BadInput(what, where=str(directory.parent), fix=fix)
    check_place(directory, directory=True)
    resolved = directory / RESOLVED_NAME
    if not resolved.exists():
        # Hidden files may be left over from a command that was killed right at its start.
        if directory.is_dir() and any(not p.name.startswith(".") for p in directory.iterdir()):
            what, fix = "not empty, and not a run of fledge", "run.output_dir=..."
            raise BadInput(what, where=str(directory), fix=fix)
        return
    if not recipe.checkpoint.resume:
        what = "already holds a run, and checkpoint.resume is false"
        raise BadInput(what, where=str(directory), fix="give another run.output_dir")
    differing = load_recipe(resolved).differences(recipe)
    differing = [line for line in differing if not line.startswith(_FREE)]
    if differing and all(line.startswith(LENGTH) for line in differing):
        if recipe.training.extend:  # `fit` checks how far the run is
            return
        newest, _ = newest_checkpoint(directory)
        if newest is not None and newest.finished:
            what = f"this run finished at step {newest.step} ({'; '.join(differing)})"
            raise BadInput(what, where=str(directory), fix=ways_on(directory))
    if differing:
        what = f"this run was started with another recipe: {'; '.join(differing[:5])}"
        fix = "give it another run.output_dir, or the recipe it was started with"
        raise BadInput(what, where=str(directory), fix=fix)


# --- longer runs ----------------------------------------------------------------------------------
# Lengthening a finished run on request (`training.extend`).
#
# The run continues where it ended: weights, moments, and the stream of packs, which is endless. The
# learning-rate schedule, which had run to its end, restarts over the added steps, warm-up included:
# a schedule over all steps would be one that the first steps did not follow. Every checkpoint
# records where it started (`schedule_from`), so that a lengthened run resumes bit for bit like any
# other.

LENGTH = ("training.steps:", "training.epochs:")  # the fields that define the length of a run


def begins(training: "Training", checkpoint: "Checkpoint") -> bool:
    """Whether the run that ended with this checkpoint is lengthened now; raises BadInput if the
    recipe has another length without asking for that."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe
    from fledge.training.checkpoint import STEPS

    now, step = training.stream.steps, checkpoint.step
    if not other_length(training.recipe, training.directory):
        # The run was lengthened before, but the checkpoints of its added steps are damaged.
        written = load_recipe(training.directory / RESOLVED_NAME)
        return written.training.extend and checkpoint.state.get(STEPS) == step < now
    before = int(checkpoint.state.get(STEPS, step))
    if before == now:  # killed after a checkpoint of the added steps, before `write_down`
        return False
    where = str(training.directory)
    if step < before:
        what = f"the run stands at step {step} of {before}: only a finished one is lengthened"
        raise BadInput(what, where=where, fix="let it end with its own recipe first")
    if now < before or not training.recipe.training.extend:
        what = f"the run finished at step {before}, the recipe asks for {now}"
        raise BadInput(what, where=where, fix=ways_on(training.directory))
    return True


def other_length(recipe: "Recipe", directory: Path) -> list[str]:
    """The length fields in which the recipe differs from the run's own recipe."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe

    lines = load_recipe(directory / RESOLVED_NAME).differences(recipe)
    return [line for line in lines if line.startswith(LENGTH)]


def ways_on(directory: Path) -> str:
    """How to train further from a finished run, for error messages."""
    return (
        "ask for more steps (or epochs) with training.extend=true, or start a new run from it: "
        f"draft.init_from={directory} and another run.output_dir"
    )


def write_down(recipe: "Recipe", directory: Path) -> None:
    """Write the new length into the run's own recipe, right after the first checkpoint that records
    it. Not earlier: older checkpoints do not record the length, and then only the recipe tells that
    the run had finished."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe

    if recipe.training.extend and other_length(recipe, directory):
        written = load_recipe(directory / RESOLVED_NAME)
        section = recipe.training
        length = {"steps": section.steps, "epochs": section.epochs, "extend": True}
        training = written.training.model_copy(update=length)
        written.model_copy(update={"training": training}).write_resolved(directory)
