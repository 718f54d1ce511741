"""Lengthening a finished run on request (`training.extend`).

The run continues where it ended: weights, moments, and the stream of packs, which is endless. The
learning-rate schedule, which had run to its end, restarts over the added steps, warm-up included: a
schedule over all steps would be one that the first steps did not follow. Every checkpoint records
where it started (`schedule_from`), so that a lengthened run resumes bit for bit like any other.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.training.checkpoint import STEPS, Checkpoint

if TYPE_CHECKING:
    from fledge.training.setup import Training

LENGTH = ("training.steps:", "training.epochs:")  # the fields that define the length of a run


def begins(training: "Training", checkpoint: Checkpoint) -> bool:
    """Whether the run that ended with this checkpoint is lengthened now; raises BadInput if the
    recipe has another length without asking for that."""
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


def other_length(recipe: Recipe, directory: Path) -> list[str]:
    """The length fields in which the recipe differs from the run's own recipe."""
    lines = load_recipe(directory / RESOLVED_NAME).differences(recipe)
    return [line for line in lines if line.startswith(LENGTH)]


def ways_on(directory: Path) -> str:
    """How to train further from a finished run, for error messages."""
    return (
        "ask for more steps (or epochs) with training.extend=true, or start a new run from it: "
        f"draft.init_from={directory} and another run.output_dir"
    )


def write_down(recipe: Recipe, directory: Path) -> None:
    """Write the new length into the run's own recipe, right after the first checkpoint that records
    it. Not earlier: older checkpoints do not record the length, and then only the recipe tells that
    the run had finished."""
    if recipe.training.extend and other_length(recipe, directory):
        written = load_recipe(directory / RESOLVED_NAME)
        section = recipe.training
        length = {"steps": section.steps, "epochs": section.epochs, "extend": True}
        training = written.training.model_copy(update=length)
        written.model_copy(update={"training": training}).write_resolved(directory)
