"""The shares of a sharded draft on disk: written by all ranks, read by any number of ranks.

This uses torch's distributed checkpoint (DCP), which has two formats. The usual one describes its
files in a pickle, which runs code when it is read. The other keeps each rank's share in a
safetensors file whose header records where the share belongs in the whole:

    shard-00001-model-00001-of-00001.safetensors     rank 0's rows of every moment
    shard-00002-model-00001-of-00001.safetensors     rank 1's

The latter is used here. A tensor in a plain safetensors file counts as a single share, so the
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


def write_shares(directory: Path, tensors: Mapping[str, Tensor], *, path: Path) -> None:
    """Write this rank's share of each tensor; all ranks call it, with the same names. A failure of
    one rank is raised on all, as an error about `path`, the directory's final name."""
    writer = HuggingFaceStorageWriter(str(directory), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as failed:
        error, _ = next(iter(failed.failures.values()))
        if isinstance(error, OSError):  # a full disk, above all
            error.filename, error.filename2 = str(path), None
        raise error from failed


def read_shares(directory: Path, wanted: Mapping[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, from a checkpoint's files.

    The caller has verified the files' checksums. Shapes and dtypes are compared before any data is
    read.
    """
    try:
        reader = HuggingFaceStorageReader(str(directory))
        metadata = reader.read_metadata()
        for name, tensor in wanted.items():
            _check(name, tensor, metadata.state_dict_metadata.get(name), directory)
        for index, share in metadata.storage_data.items():
            if index.fqn in wanted and share.dtype != wanted[index.fqn].dtype:
                raise BadInput(f"{index.fqn} is {share.dtype} in a share", where=str(directory))
        with warnings.catch_warnings():
            # DCP warns about no_dist, which is intended: every rank reads for itself.
            warnings.simplefilter("ignore", UserWarning)
            load(dict(wanted), storage_reader=reader, no_dist=True)
    except BadInput:
        raise
    except _read_errors() as error:
        what = f"its shares cannot be put together ({first_line(error)})"
        raise BadInput(what, where=str(directory), fix=_DAMAGED) from error


def held_names(directory: Path) -> set[str]:
    """The names of the tensors in a checkpoint's files, whole or in part."""
    try:
        return set(HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata)
    except broken_files() as error:
        what = f"its shares cannot be read ({first_line(error)})"
        raise BadInput(what, where=str(directory), fix=_DAMAGED) from error


def _read_errors() -> tuple[type[BaseException], ...]:
    return (CheckpointException, *broken_files())


def _check(name: str, wanted: Tensor, saved: Any, directory: Path) -> None:
    """Raise BadInput if a tensor is missing, has another shape or dtype, or has gaps, which DCP
    would silently leave unfilled."""
    fault = ""
    if not isinstance(saved, TensorStorageMetadata):
        fault = "missing"
    elif saved.size != wanted.shape or saved.properties.dtype != wanted.dtype:
        fault = f"{saved.properties.dtype} {list(saved.size)}"
    elif min((offset for chunk in saved.chunks for offset in chunk.offsets), default=0) < 0:
        fault = "in places before its beginning"
    elif sum(math.prod(chunk.sizes) for chunk in saved.chunks) != wanted.numel():
        fault = "incomplete"
    if fault:
        what = f"{name} is {fault}, expected {wanted.dtype} {list(wanted.shape)}"
        raise BadInput(what, where=str(directory), fix=_DAMAGED)
