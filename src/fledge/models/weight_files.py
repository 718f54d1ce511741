"""Tensors from a model's directory, all or some: safetensors, sharded or not, or torch's own files.

Reading two tables of a target must not require loading the target: only the requested tensors of
safetensors files are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from fledge.core.errors import BadInput, first_line

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_EXCLUDED = ("vision", "visual", "audio", "mtp")  # towers and extra heads with their own tables


def weight_files(directory: Path) -> list[Path]:
    """Safetensors files if there are any, else torch's own; without files for training only."""
    for pattern in ("*.safetensors", "*.bin"):
        paths, excluded = sorted(directory.glob(pattern)), ("training", "optimizer", "adapter")
        if files := [path for path in paths if not path.name.startswith(excluded)]:
            return files
    fix = "give the directory that holds model.safetensors or pytorch_model.bin"
    raise BadInput("no weights here", where=str(directory), fix=fix)


def read_tensors(
    directory: Path, *, wanted: Callable[[str], object] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors whose names `wanted` accepts, by name."""
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            tensors |= _tensors_of(path, wanted)
        except MemoryError:
            raise
        except Exception as error:  # torch's reader may raise anything
            raise BadInput(f"cannot be read ({first_line(error)})", where=str(path)) from error
    return tensors


def _tensors_of(path: Path, wanted: Callable[[str], object]) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in filter(wanted, handle.keys())}
    contents = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    return {name: x for name, x in contents.items() if isinstance(x, Tensor) and wanted(name)}


@dataclass(frozen=True)
class TargetTables:
    """The target's input embedding and output head: the same tensor if they are tied."""

    embedding_VD: Tensor
    head_VD: Tensor


def read_target_tables(directory: Path) -> TargetTables:
    """Read the two tables of a target without loading the rest of it."""
    tables = read_tensors(directory, wanted=lambda name: _is_table(name, _EMBEDDINGS + _HEADS))
    embeddings = [table for name, table in tables.items() if _is_table(name, _EMBEDDINGS)]
    heads = [table for name, table in tables.items() if _is_table(name, _HEADS)]
    if not embeddings or not embeddings[0].is_floating_point():
        what = "no input embedding in floating point among its weights"
        raise BadInput(what, where=str(directory))
    head_VD = heads[0] if heads and heads[0].is_floating_point() else embeddings[0]
    return TargetTables(embeddings[0], head_VD)


def _is_table(name: str, endings: tuple[str, ...]) -> bool:
    return name.endswith(endings) and not any(part in name for part in _EXCLUDED)
