"""What several ranks hold of one draft, on disk: written by all, read by however many there are.

The engine is torch's distributed checkpoint (DCP). It knows two formats. The usual one describes
its files in a pickle, which runs code when it is read. The other keeps each rank's share in a
safetensors file whose header says where the share belongs in the whole:

    shard-00001-model-00001-of-00001.safetensors     rank 0's rows of every moment
    shard-00002-model-00001-of-00001.safetensors     rank 1's

That one is used here. A tensor in a plain safetensors file is a share that is the whole, so the
draft's own weights, and the checkpoints of runs that were not sharded, are read in the same way.
"""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fledge.core.errors import BadInput, broken_files, first_line

_DAMAGED = "remove it: the one before it is used"


def write_shares(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's share of each tensor; all ranks call it, with the same names."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    save(dict(tensors), storage_writer=writer)


def read_shares(directory: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole ones or shares, with what a checkpoint's files hold of them.

    The caller has looked at the files' checksums; what they hold is compared with what is wanted
    before a number is read.
    """
    try:
        reader = HuggingFaceStorageReader(str(directory))
        held = reader.read_metadata()
        for name, tensor in wanted.items():
            _check(name, tensor, held.state_dict_metadata.get(name), directory)
        for place, share in held.storage_data.items():
            if place.fqn in wanted and share.dtype != wanted[place.fqn].dtype:
                raise BadInput(f"{place.fqn} is {share.dtype} in a share", where=str(directory))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # every rank reads for itself: on purpose
            load(dict(wanted), storage_reader=reader, no_dist=True)
    except BadInput:
        raise
    except _broken() as error:
        told = f"its shares cannot be put together ({first_line(error)})"
        raise BadInput(told, where=str(directory), fix=_DAMAGED) from error


def held_names(directory: Path) -> set[str]:
    """The tensors of which a checkpoint's files hold anything."""
    try:
        return set(HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata)
    except broken_files() as error:
        told = f"its shares cannot be read ({first_line(error)})"
        raise BadInput(told, where=str(directory), fix=_DAMAGED) from error


def _broken() -> tuple[type[BaseException], ...]:
    return (CheckpointException, *broken_files())


def _check(name: str, own: Tensor, held: Any, directory: Path) -> None:
    """Refuse what is not there, of another kind, or has holes: DCP would leave them as they are."""
    told = ""
    if not isinstance(held, TensorStorageMetadata):
        told = "missing"
    elif held.size != own.shape or held.properties.dtype != own.dtype:
        told = f"{held.properties.dtype} {list(held.size)}"
    elif min((place for chunk in held.chunks for place in chunk.offsets), default=0) < 0:
        told = "in places before its beginning"
    elif sum(math.prod(chunk.sizes) for chunk in held.chunks) != own.numel():
        told = "incomplete"
    if told:
        what = f"{name} is {told}, expected {own.dtype} {list(own.shape)}"
        raise BadInput(what, where=str(directory), fix=_DAMAGED)
