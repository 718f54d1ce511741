"""A draft on disk: config.json and model.safetensors in the plain layout, whole or absent.

Engine-specific layouts are made from this one by `export`.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from fledge.core.errors import BadInput, broken_files, first_line
from fledge.core.files import atomic_directory, save_tensors, write_json
from fledge.core.reading import load_tensors, read_json, tensor_shapes
from fledge.draft.config import CONFIG_FILE, check_config_fits, check_draft_config
from fledge.draft.rotary import rope_parameters, rotary_frequencies

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_WHOLE = "is it a draft, and whole?"
_LABELS = ("num_labels", "id2label", "label2id")  # a classifier's: transformers would make a list


def config_json(config: Any, dtype: torch.dtype, architecture: str) -> dict[str, Any]:
    """The config as engines read it: plain Llama keys, both spellings of the rotary settings."""
    values: dict[str, Any] = config.to_dict()
    for name in ("id2label", "label2id", "_name_or_path", "rope_scaling"):
        values.pop(name, None)
    rope = rope_parameters(config)
    values |= {
        "architectures": [architecture],
        "model_type": "llama",
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if rope["rope_type"] != "default":
        values["rope_scaling"] = rope  # where transformers 4 and the engines pinned to it look
    return values


def write_draft_files(
    directory: Path, config: Any, state: Mapping[str, Tensor], architecture: str
) -> None:
    """Write a draft into a directory that the caller completes."""
    tensors = {name: value.detach().contiguous() for name, value in state.items()}
    dtype = tensors["lm_head.weight"].dtype
    write_json(directory / CONFIG_NAME, config_json(config, dtype, architecture))
    save_tensors(directory / WEIGHTS_NAME, tensors, {"format": "pt"})


def write_with(draft: Path, directory: Path, changed: Mapping[str, Any]) -> None:
    """The same draft in another, new directory, with some keys of its config changed."""
    values = read_config(draft)
    with atomic_directory(directory) as place:
        shutil.copyfile(draft / WEIGHTS_NAME, place / WEIGHTS_NAME)
        write_json(place / CONFIG_NAME, {**values, **changed})


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a draft, as it stands."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise _absent(path)
    values: dict[str, Any] = read_json(path, CONFIG_FILE, what="the config", fix=_WHOLE)
    return values


def read_draft_config(directory: Path) -> Any:
    """The config of a draft, checked."""
    values = read_config(directory)
    with _one_line(directory / CONFIG_NAME):
        config = LlamaConfig(**{key: values[key] for key in values if key not in _LABELS})
        check_draft_config(config)
    return config


def read_draft(directory: Path) -> tuple[Any, dict[str, Tensor]]:
    """The checked config, and the tensors; `check_tensors` compares them."""
    config = read_draft_config(directory)
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise _absent(path)
    check_config_fits(config, tensor_shapes(path, what="the draft"), where=str(path))
    with _one_line(directory / CONFIG_NAME):
        if not bool(rotary_frequencies(config)[0].isfinite().all()):
            raise ValueError("its rotary settings turn by angles that are not finite")
    return config, load_tensors(path, what="the draft")


def _absent(path: Path) -> BadInput:
    return BadInput(
        f"no {path.name} here", where=str(path.parent), fix="give the directory of a draft"
    )


@contextlib.contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except broken_files() as error:
        raise BadInput(f"broken ({first_line(error)})", where=str(path), fix=_WHOLE) from error


def check_tensors(
    directory: Path, *, want: Mapping[str, Tensor], have: Mapping[str, Tensor]
) -> None:
    """Refuse files that would leave a tensor random or unread, or whose numbers cannot be used."""
    both = sorted(set(want) & set(have))
    faults = {
        "missing": sorted(set(want) - set(have)),
        "unknown": sorted(set(have) - set(want)),
        "of another shape than config.json says": [
            f"{name} {tuple(have[name].shape)} not {tuple(want[name].shape)}"
            for name in both
            if want[name].shape != have[name].shape
        ],
    }
    complaints = [f"{fault}: {_some(names)}" for fault, names in faults.items() if names]
    if complaints:
        raise BadInput(
            f"tensors {', '.join(complaints)}",
            where=str(directory / WEIGHTS_NAME),
            fix="is it a draft in the plain layout? `fledge import` reads others",
        )
    if broken := [name for name in both if not _finite(have[name])]:
        raise BadInput(
            f"the draft's weights hold NaN or infinity: tensor {_some(broken)}",
            where=str(directory / WEIGHTS_NAME),
            fix="the file is damaged: take another checkpoint",
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
