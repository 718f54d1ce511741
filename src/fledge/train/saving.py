"""A run's state, to its checkpoints and back, whatever number of ranks shared it or share it now.

A run that is not sharded writes its moments into `training.safetensors`, by its main rank. In a
sharded one every rank writes its share of them beside that file (`shard_files.py`), and the main
rank everything else, the whole draft included; then it gives the directory its name. Either kind is
read by any number of ranks.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fledge.core.distributed import World
from fledge.core.files import atomic_directory, removed
from fledge.train import checkpoint as checkpoints
from fledge.train.shard_files import held_names, read_shares, write_shares
from fledge.train.sharding import whole_tensor
from fledge.train.step import Sums

if TYPE_CHECKING:
    from fledge.train.setup import Training

_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEPPED = "stepped."  # weights that the optimizer works on, where the draft holds their average


def save(training: "Training", state: Mapping[str, Any], window: Sums) -> Path:
    """Write a checkpoint; all ranks call it, and it is there when they return."""
    with training.parts.averaged():
        return _save(training, state, window)


def _save(training: "Training", state: Mapping[str, Any], window: Sums) -> Path:
    parts, directory = training.parts, training.directory
    # Held sums are this rank's share; the main rank keeps everybody's, the others restart at zero.
    kept = window.over(parts.world)
    if parts.world.is_main and not training.vocabulary_path.exists():
        raise removed(directory)
    tensors = {
        **checkpoints.optimizer_tensors(parts.optimizers, _names(training)),
        **_stepped(training),
        **{f"guard.{name}": tensor for name, tensor in parts.guard.state().items()},
        **{f"window.{name}": tensor for name, tensor in vars(kept).items()},
        **checkpoints.rng_tensors(),
    }
    record = {
        **state,
        checkpoints.STEPS: training.stream.steps,
        checkpoints.PACKS: training.stream.packs_per_step,
        "fingerprints": training.fingerprints,
    }
    path = checkpoints.checkpoint_path(directory, record["step"])
    if parts.world.shard > 1:
        _save_shares(training, path, record, tensors)
    elif parts.world.is_main:
        with atomic_directory(path) as temporary:
            training.draft.write(temporary)
            checkpoints.complete(temporary, record, tensors)
    return path


def _save_shares(
    training: "Training", path: Path, record: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    world, draft = training.parts.world, training.draft
    shared = {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith(_MOMENTS) or name.startswith(_STEPPED)
    }
    with _one_directory(path, world) as temporary:
        write_shares(temporary, shared)
        whole = {}
        for name, tensor in draft.state_dict().items():
            gathered = whole_tensor(tensor)  # by all ranks, one at a time
            if world.is_main:
                whole[name] = gathered.cpu()
        if world.is_main:
            draft.write(temporary, whole)
            rest = {name: tensor for name, tensor in tensors.items() if name not in shared}
            checkpoints.complete(temporary, record, rest)


@contextlib.contextmanager
def _one_directory(path: Path, world: World) -> Iterator[Path]:
    """A directory that all ranks write to and the main rank names: whole or absent, as ever."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(atomic_directory(path)) if world.is_main else None
        yield Path(world.from_main(str(own)))
        world.barrier()


def newest(training: "Training") -> tuple[checkpoints.Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what was wrong with newer ones: looked at by the main rank
    for all of them."""
    world = training.parts.world
    found, complaints = None, list[str]()
    if world.is_main:
        found, complaints = checkpoints.newest_checkpoint(training.directory)
    step, complaints = world.from_main((None if found is None else found.step, complaints))
    if found is None and step is not None:
        path = checkpoints.checkpoint_path(training.directory, step)
        found = checkpoints.Checkpoint(path, checkpoints.read_state(path))
    return found, complaints


def restore(training: "Training", checkpoint: checkpoints.Checkpoint, window: Sums) -> None:
    """Weights, moments, guard, sums and generators as they were."""
    parts, draft = training.parts, training.draft
    if parts.world.shard > 1 or checkpoint.is_sharded:
        tensors = checkpoint.tensors(but=_MOMENTS)
        tensors |= _read_shares(training, checkpoint.path)
    else:
        tensors = checkpoint.tensors()
        own = draft.state_dict()
        draft.load_state_dict(checkpoints.matching(checkpoint.draft_tensors(), own))
    for optimizer in parts.optimizers:
        checkpoints.restore_optimizer(optimizer, _names(training), tensors)
    if parts.average is not None:
        _restore_stepped(training, tensors)
    parts.guard.load(checkpoints.matching(tensors, parts.guard.state(), prefix="guard."))
    checkpoints.restore_rng(tensors)
    if parts.world.is_main:
        kept = checkpoints.matching(tensors, vars(window), prefix="window.")
        for name, tensor in vars(window).items():
            tensor.copy_(kept[name])


def _read_shares(training: "Training", path: Path) -> dict[str, Tensor]:
    """Read the weights where they are; return the moments, cut as the weights are."""
    names, held = _names(training), held_names(path)
    moments = {
        name: torch.zeros_like(parameter)
        for parameter in training.parts.parameters
        for key in _MOMENTS
        if (name := f"optimizer.{names[id(parameter)]}.{key}") in held
    }
    stepped = {name: torch.zeros_like(tensor) for name, tensor in _stepped(training).items()}
    read_shares(path, {**training.draft.state_dict(), **moments, **stepped})
    return {**moments, **stepped}


def _stepped(training: "Training") -> dict[str, Tensor]:
    """What lies aside while the draft holds the average of its weights."""
    parts, names = training.parts, _names(training)
    if parts.average is None:
        return {}
    aside = zip(parts.parameters, parts.average.aside, strict=True)
    return {f"{_STEPPED}{names[id(parameter)]}": tensor for parameter, tensor in aside}


def _restore_stepped(training: "Training", tensors: Mapping[str, Tensor]) -> None:
    """The draft was read with its average in it: lay the weights aside, and change places."""
    for name, tensor in checkpoints.matching(tensors, _stepped(training)).items():
        own = _stepped(training)[name]
        own.copy_(tensor)
    assert training.parts.average is not None
    training.parts.average.swap(training.parts.parameters)


def _names(training: "Training") -> dict[int, str]:
    return {id(parameter): name for name, parameter in training.draft.named_parameters()}
