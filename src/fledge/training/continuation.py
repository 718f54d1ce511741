"""Whether an output directory holds a run of the recipe, checked before torch is loaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from fledge.core.errors import BadInput
from fledge.core.files import check_place

if TYPE_CHECKING:
    from fledge.recipe.schema import Recipe


# Fields that may differ between a run and its continuation: they do not affect the arithmetic, or
# (`record_steps`) only its last digits. Data and target may have moved: their contents are checked
# by fingerprint. A step may be split differently over ranks: `resume` checks that it is the same.
_FREE = (
    "run.", "data.train:", "data.valid:", "target.model:", "tracking.", "checkpoint.",
    "evaluation.every_steps", "data.workers", "training.prefetch", "training.device",
    "target.device", "training.max_bad_steps", "target.urls",
    "target.token_env", "target.prefetch", "target.timeout_s", "target.retries",
    "target.wait_s", "training.shard", "training.context",
    "training.micro_batch", "training.accumulate", "target.address", "target.workers",
    "target.worker_cpus", "target.worker_gpus", "target.placement",
    "target.shared_dir", "training.record_steps",
)  # fmt: skip


def check_existing(recipe: "Recipe") -> None:
    """Raise BadInput if the output directory holds a run of another recipe, or other files."""
    from fledge.recipe.schema import RESOLVED_NAME, load_recipe

    directory = Path(recipe.run.output_dir)
    check_place(directory, directory=True)
    resolved = directory / RESOLVED_NAME
    if not resolved.exists():
        # Hidden files may be left over from a command that was killed right at its start.
        if directory.is_dir() and any(not p.name.startswith(".") for p in directory.iterdir()):
            what, fix = "not empty, and not a run of fledge", "run.output_dir=..."
            raise BadInput(what, where=str(directory), fix=fix)
        return
    differing = load_recipe(resolved).differences(recipe)
    differing = [line for line in differing if not line.startswith(_FREE)]
    if differing:
        what = f"this run was started with another recipe: {'; '.join(differing[:5])}"
        fix = f"continue it with its own recipe, or {way_on(directory)}"
        raise BadInput(what, where=str(directory), fix=fix)


def way_on(directory: Path) -> str:
    """How to train further from a run's draft, for messages."""
    return f"start a new run from it: draft.init_from={directory} and another run.output_dir"
