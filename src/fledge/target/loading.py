"""From a name to a loaded Hugging Face model, plain or quantised.

What a name may be is decided in `fledge.models`; this takes the directory it stands for, loads it
with the number format it is stored in (or asked for), on one device, and turns a refusal into one
line.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fledge.errors import BadInput
from fledge.target.weights import quantisation_method

# One of these is in every directory that holds a tokenizer; without any, transformers makes up an
# empty one for some architectures.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@dataclass(frozen=True)
class LoadedTarget:
    model: nn.Module
    tokenizer: Any  # None when the directory holds none
    stored_as: str | None  # the checkpoint's own quantisation method, if it has one


def load_target(
    name_or_path: str | PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """The model on `device` (a GPU where there is one), with its tokenizer."""
    import transformers

    from fledge.models.resolve import local_model

    directory = local_model(str(name_or_path))
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    try:
        config = transformers.AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
        stored_as = quantisation_method(config)
        if stored_as is not None or quantization_config is not None:
            options["device_map"] = {"": device}  # quantised weights are packed where they will run
        model: nn.Module = _loader_for(config).from_pretrained(directory, **options)
    except (OSError, ValueError, RuntimeError, ImportError, NotImplementedError) as error:
        raise BadInput(
            f"the target could not be loaded on {device} ({_first_line(error)})",
            where=str(name_or_path),
            fix="check the files, and whether this machine can run their number format",
        ) from error
    if "device_map" not in options:
        model = model.to(device)
    tokenizer = tokenizer_in(directory, trust_remote_code=trust_remote_code)
    return LoadedTarget(model, tokenizer, stored_as)


def _loader_for(config: Any) -> Any:
    """The text-only auto class where the architecture has one, else the image-text one."""
    import transformers

    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    return transformers.AutoModelForCausalLM  # remote code, or an error that names what is missing


def tokenizer_in(directory: Path, *, trust_remote_code: bool) -> Any:
    """The tokenizer beside a target's weights; None when there is none."""
    import transformers

    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError):
        return None  # a target runs without one; its fingerprint is then absent


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
