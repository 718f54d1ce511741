"""A finished run that is lengthened on purpose (`training.extend`).

The run goes on where it ended: weights, moments, and the stream of packs, which has no end. The
schedule, which had come down to its end, begins anew over the added steps, warm-up included: a
schedule over all steps would be one that the first steps did not follow. Where it began is in every
checkpoint (`schedule_from`), so that a lengthened run resumes bit for bit as any other does.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.recipe.schema import RESOLVED_NAME, Recipe, load_recipe
from fledge.train.checkpoint import STEPS, Checkpoint

if TYPE_CHECKING:
    from fledge.train.setup import Training

LENGTH = ("training.steps:", "training.epochs:")  # the fields that say how long a run is


def begins(training: "Training", checkpoint: Checkpoint) -> bool:
    """Whether a run that this checkpoint ended goes on now; refused unless it was asked for."""
    now, step = training.stream.steps, checkpoint.step
    if not other_length(training.recipe, training.directory):
        # the run is known to be lengthened, but the checkpoints of its added steps are damaged
        written = load_recipe(training.directory / RESOLVED_NAME)
        return written.training.extend and checkpoint.state.get(STEPS) == step < now
    before = _steps_before(training, checkpoint)
    if before == now:  # killed behind a checkpoint of the added steps, before `write_down`
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
    """In which fields the recipe is longer or shorter than the run's own."""
    lines = load_recipe(directory / RESOLVED_NAME).differences(recipe)
    return [line for line in lines if line.startswith(LENGTH)]


def ways_on(directory: Path) -> str:
    """What to do with a finished run of which one wants more."""
    return (
        "ask for more steps (or epochs) with training.extend=true, or start a new run from it: "
        f"draft.init_from={directory} and another run.output_dir"
    )


def write_down(recipe: Recipe, directory: Path) -> None:
    """The run's own recipe says its new length as soon as a checkpoint does: not before, or an
    older run, whose checkpoints do not say theirs, could not be known to have ended."""
    if recipe.training.extend and other_length(recipe, directory):
        written = load_recipe(directory / RESOLVED_NAME)
        section = recipe.training
        length = {"steps": section.steps, "epochs": section.epochs, "extend": True}
        training = written.training.model_copy(update=length)
        written.model_copy(update={"training": training}).write_resolved(directory)


def _steps_before(training: "Training", checkpoint: Checkpoint) -> int:
    """How many steps the run was to have when the checkpoint was saved."""
    from fledge.train.setup import make_stream

    if STEPS in checkpoint.state:
        return int(checkpoint.state[STEPS])
    written = load_recipe(training.directory / RESOLVED_NAME)
    return make_stream(training, written).steps
