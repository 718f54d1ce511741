"""Saves a run's state to checkpoints and restores it, over any number of ranks on either side.

The main rank writes a checkpoint, which holds whole tensors however the draft is sharded. Every
rank reads it, and keeps its share.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fledge.core.distributed import World
from fledge.core.files import atomic_directory, removed
from fledge.target.weights import whole_tensor
from fledge.training import checkpoint as checkpoints
from fledge.training.sharding import sharded_like
from fledge.training.step import Sums

if TYPE_CHECKING:
    from fledge.training.setup import Training


def save(training: "Training", state: Mapping[str, Any], window: Sums) -> Path:
    """Write a checkpoint and return its path. All ranks must call this."""
    parts, directory, draft = training.parts, training.directory, training.draft
    # `window` is this rank's share. Saved are the sums over all ranks; on resuming, the main rank
    # starts from them and the others from zero.
    total = window.over(parts.world)
    if parts.world.is_main and not training.vocabulary_path.exists():
        raise removed(directory)
    record = {
        **state,
        checkpoints.STEPS: training.stream.steps,
        checkpoints.PACKS: training.stream.packs_per_step,
        "fingerprints": training.fingerprints,
    }
    path = checkpoints.checkpoint_path(directory, record["step"])
    moments = checkpoints.optimizer_tensors(parts.optimizers, _names(training))
    tensors = {
        **_on_main(moments, parts.world),
        **{f"guard.{name}": tensor for name, tensor in parts.guard.state().items()},
        **{f"window.{name}": tensor for name, tensor in vars(total).items()},
    }
    weights = _on_main(draft.state_dict(), parts.world)
    if parts.world.is_main:
        with atomic_directory(path) as temporary:
            draft.write(temporary, weights)
            checkpoints.complete(temporary, record, tensors)
    return path


def _on_main(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The whole tensors on the main rank, one after the other moved to its host memory; nothing on
    the others, which take part because gathering is a collective."""
    if world.shard == 1:
        return dict(tensors)
    whole = {}
    for name, tensor in tensors.items():
        gathered = whole_tensor(tensor)
        if world.is_main:
            whole[name] = gathered.cpu()
    return whole


def newest(training: "Training") -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and what was wrong with newer ones. Only the main rank verifies
    them; the others use its result."""
    world = training.parts.world
    return world.from_main(
        checkpoints.newest_checkpoint(training.directory) if world.is_main else (None, [])
    )


def restore(training: "Training", checkpoint: checkpoints.Checkpoint, window: Sums) -> None:
    """Restore weights, moments, guard and sums from a checkpoint. Random draws follow the step."""
    parts, draft, tensors = training.parts, training.draft, checkpoint.tensors()
    current = draft.state_dict()
    weights = checkpoints.matching(checkpoint.draft_tensors(), current)
    draft.load_state_dict({name: sharded_like(t, current[name]) for name, t in weights.items()})
    for optimizer in parts.optimizers:
        checkpoints.restore_optimizer(optimizer, _names(training), tensors)
    parts.guard.load(checkpoints.matching(tensors, parts.guard.state(), prefix="guard."))
    if parts.world.is_main:
        saved = checkpoints.matching(tensors, vars(window), prefix="window.")
        for name, tensor in vars(window).items():
            tensor.copy_(saved[name])


def _names(training: "Training") -> dict[int, str]:
    return {id(parameter): name for name, parameter in training.draft.named_parameters()}
