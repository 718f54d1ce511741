"""Saves a run's state to checkpoints and restores it, over any number of ranks on either side.

In a run that is not sharded, the main rank writes the optimizer moments into
`training.safetensors`. In a sharded one every rank writes its share of them beside that file
(`shard_files.py`), and the main rank writes everything else, including the whole draft, and then
renames the directory to its final name. Any number of ranks can read either kind.
"""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from fledge.core.distributed import World
from fledge.core.errors import BadInput, first_line
from fledge.core.files import atomic_directory, removed
from fledge.training import checkpoint as checkpoints
from fledge.training.sharding import whole_tensor
from fledge.training.step import Sums

if TYPE_CHECKING:
    from fledge.training.setup import Training


# --- shard files ---------------------------------------------------------------------------------
# The shares of a sharded draft on disk: written by all ranks, read by any number of ranks.
#
# This uses torch's distributed checkpoint (DCP), which has two formats. The usual one describes its
# files in a pickle, which runs code when it is read. The other keeps each rank's share in a
# safetensors file whose header records where the share belongs in the whole:
#
#     shard-00001-model-00001-of-00001.safetensors     rank 0's rows of every moment
#     shard-00002-model-00001-of-00001.safetensors     rank 1's
#
# The latter is used here. A tensor in a plain safetensors file counts as a single share, so the
# draft's own weights, and the checkpoints of runs that were not sharded, are read in the same way.


def write_shares(directory: Path, tensors: Mapping[str, Tensor], *, path: Path) -> None:
    """Write this rank's share of each tensor; all ranks call it, with the same names. A failure of
    one rank is raised on all, as an error about `path`, the directory's final name."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        save_shards(dict(tensors), storage_writer=writer)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, OSError):  # a full disk, above all
            error.filename, error.filename2 = str(path), None
        raise error from failed


def read_shares(directory: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, from a checkpoint's files, whose checksums the caller has
    verified."""
    reader = HuggingFaceStorageReader(str(directory))
    with warnings.catch_warnings():
        # DCP warns about no_dist, which is intended: every rank reads for itself.
        warnings.simplefilter("ignore", UserWarning)
        try:
            load(dict(wanted), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            what = f"its shares cannot be put together ({first_line(error)})"
            fix = "remove it: the one before it is used"
            raise BadInput(what, where=str(directory), fix=fix) from error


def held_names(directory: Path) -> set[str]:
    """The names of the tensors in a checkpoint's files, whole or in part."""
    return set(HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata)


# --- saving ---------------------------------------------------------------------------------------


_MOMENTS = ("exp_avg", "exp_avg_sq")


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
    tensors = {
        **checkpoints.optimizer_tensors(parts.optimizers, _names(training)),
        **{f"guard.{name}": tensor for name, tensor in parts.guard.state().items()},
        **{f"window.{name}": tensor for name, tensor in vars(total).items()},
        **checkpoints.rng_tensors(),
    }
    if parts.world.shard > 1:
        _save_shares(training, path, record, tensors)
    elif parts.world.is_main:
        with atomic_directory(path) as temporary:
            draft.write(temporary)
            checkpoints.complete(temporary, record, tensors)
    return path


def _save_shares(
    training: "Training", path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    world, draft = training.parts.world, training.draft
    shared = {name: tensor for name, tensor in tensors.items() if name.endswith(_MOMENTS)}
    with _shared_directory(path, world) as temporary:
        write_shares(temporary, shared, path=path)
        whole = {}
        for name, tensor in draft.state_dict().items():
            gathered = whole_tensor(tensor)  # a collective: all ranks take part
            if world.is_main:
                whole[name] = gathered.cpu()
        if world.is_main:
            draft.write(temporary, whole)
            rest = {name: tensor for name, tensor in tensors.items() if name not in shared}
            checkpoints.complete(temporary, record, rest)


@contextlib.contextmanager
def _shared_directory(path: Path, world: World) -> Iterator[Path]:
    """An atomic directory that all ranks write to; the main rank renames it when all are done."""
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(atomic_directory(path)) if world.is_main else None
        yield Path(world.from_main(str(temporary)))
        world.barrier()


def newest(training: "Training") -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """The newest intact checkpoint, and what was wrong with newer ones. Only the main rank verifies
    them; the others use its result."""
    world = training.parts.world
    checkpoint, complaints = None, list[str]()
    if world.is_main:
        checkpoint, complaints = checkpoints.newest_checkpoint(training.directory)
    step, complaints = world.from_main(
        (None if checkpoint is None else checkpoint.step, complaints)
    )
    if checkpoint is None and step is not None:
        path = checkpoints.checkpoint_path(training.directory, step)
        checkpoint = checkpoints.Checkpoint(path, checkpoints.read_state(path))
    return checkpoint, complaints


def restore(training: "Training", checkpoint: checkpoints.Checkpoint, window: Sums) -> None:
    """Restore weights, moments, guard, sums and random generators from a checkpoint."""
    parts, draft = training.parts, training.draft
    if parts.world.shard > 1 or checkpoint.is_sharded:
        tensors = checkpoint.tensors(but=_MOMENTS)
        tensors |= _read_shares(training, checkpoint.path)
    else:
        tensors = checkpoint.tensors()
        current = draft.state_dict()
        draft.load_state_dict(checkpoints.matching(checkpoint.draft_tensors(), current))
    for optimizer in parts.optimizers:
        checkpoints.restore_optimizer(optimizer, _names(training), tensors)
    parts.guard.load(checkpoints.matching(tensors, parts.guard.state(), prefix="guard."))
    checkpoints.restore_rng(tensors)
    if parts.world.is_main:
        saved = checkpoints.matching(tensors, vars(window), prefix="window.")
        for name, tensor in vars(window).items():
            tensor.copy_(saved[name])


def _read_shares(training: "Training", path: Path) -> dict[str, Tensor]:
    """Read the draft's weights in place; return the moments, sharded like them."""
    names, saved_names = _names(training), held_names(path)
    moments = {
        name: torch.zeros_like(parameter)
        for parameter in training.parts.parameters
        for key in _MOMENTS
        if (name := f"optimizer.{names[id(parameter)]}.{key}") in saved_names
    }
    read_shares(path, {**training.draft.state_dict(), **moments})
    return moments


def _names(training: "Training") -> dict[int, str]:
    return {id(parameter): name for name, parameter in training.draft.named_parameters()}
