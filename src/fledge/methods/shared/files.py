"""A draft on disk: config.json and model.safetensors in the plain layout, written atomically.

`export` converts this layout to those of engines.
"""

import contextlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig

from fledge.core.errors import BadInput, broken_files, first_line
from fledge.core.files import atomic_directory, write_json
from fledge.core.reading import check, load_tensors, read_json
from fledge.methods.registry import method_of
from fledge.methods.shared.config import DraftConfig
from fledge.methods.shared.rotary import rope_parameters, rotary_frequencies

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
_FIX = "is it a draft, and complete?"
_LABELS = ("num_labels", "id2label", "label2id")  # of classifiers: transformers would build a list


def config_json(config: PretrainedConfig, dtype: torch.dtype, architecture: str) -> dict[str, Any]:
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
        values["rope_scaling"] = rope  # for transformers 4 and the engines pinned to it
    return values


def write_with(draft: Path, directory: Path, changed: Mapping[str, Any]) -> None:
    """Copy a draft to a new directory, with some keys of its config changed."""
    values = read_config(draft)
    with atomic_directory(directory) as temporary:
        shutil.copyfile(draft / WEIGHTS_NAME, temporary / WEIGHTS_NAME)
        write_json(temporary / CONFIG_NAME, {**values, **changed})


def read_config(directory: Path) -> dict[str, Any]:
    """The contents of a draft's config.json, unchanged."""
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise _missing_file(path)
    values: dict[str, Any] = read_json(path, DraftConfig.file_keys(), what="the config", fix=_FIX)
    return values


def read_draft_config(directory: Path) -> PretrainedConfig:
    """The checked config of a draft."""
    path, values = directory / CONFIG_NAME, read_config(directory)
    with _reporting_broken(path):
        config = LlamaConfig(**{key: values[key] for key in values if key not in _LABELS})
    family = method_of(config).draft_type().config_type
    check(values, family.file_keys(), where=str(path), what="the config", fix=_FIX)
    with _reporting_broken(path):
        family.of(config)
    return config


def read_draft(directory: Path) -> tuple[PretrainedConfig, dict[str, Tensor]]:
    """The checked config and the tensors of a draft; `check_tensors` compares the two."""
    config, path = read_draft_config(directory), directory / WEIGHTS_NAME
    if not path.is_file():
        raise _missing_file(path)
    with _reporting_broken(directory / CONFIG_NAME):
        if not bool(rotary_frequencies(config)[0].isfinite().all()):
            raise ValueError("its rotary settings give angles that are not finite")
    return config, load_tensors(path, what="the draft")


def _missing_file(path: Path) -> BadInput:
    return BadInput(
        f"no {path.name} here", where=str(path.parent), fix="give the directory of a draft"
    )


@contextlib.contextmanager
def _reporting_broken(path: Path) -> Iterator[None]:
    """Turn errors of broken files into a one-line BadInput about `path`."""
    try:
        yield
    except broken_files() as error:
        raise BadInput(f"broken ({first_line(error)})", where=str(path), fix=_FIX) from error


def check_tensors(
    directory: Path, *, want: Mapping[str, Tensor], have: Mapping[str, Tensor]
) -> None:
    """Refuse files with missing or unknown tensors, wrong shapes, or values that are not finite."""
    common = sorted(set(want) & set(have))
    faults = {
        "missing": sorted(set(want) - set(have)),
        "unknown": sorted(set(have) - set(want)),
        "of another shape than config.json says": [
            f"{name} {tuple(have[name].shape)} not {tuple(want[name].shape)}"
            for name in common
            if want[name].shape != have[name].shape
        ],
    }
    complaints = [f"{fault}: {_first_few(names)}" for fault, names in faults.items() if names]
    if complaints:
        raise BadInput(
            f"tensors {', '.join(complaints)}",
            where=str(directory / WEIGHTS_NAME),
            fix="is it a draft in the plain layout? `fledge import` reads others",
        )
    floats = [name for name in common if have[name].is_floating_point()]
    if broken := [name for name in floats if not bool(have[name].isfinite().all())]:
        raise BadInput(
            f"the draft's weights hold NaN or infinity: tensor {_first_few(broken)}",
            where=str(directory / WEIGHTS_NAME),
            fix="the file is damaged: take another checkpoint",
        )


def _first_few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
