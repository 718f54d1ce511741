"""From a name to a loaded Hugging Face model: plain, GGUF or quantised checkpoints.

Not here: the embedded model names and their cache (`fledge.models`); this takes what transformers
can load, on one device, and turns its refusals into one line.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fledge.errors import BadInput


def load_target(
    name_or_path: str | PathLike[str],
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    attn_implementation: str | None = None,
    quantization_config: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[nn.Module, Any]:
    """The model on `device` (a GPU where there is one) and its tokenizer, or None without one."""
    import transformers

    name = str(name_or_path)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        source["revision"] = revision
    options: dict[str, Any] = {"dtype": dtype}
    if name.endswith(".gguf"):
        path = Path(name)
        name, source["gguf_file"] = str(path.parent), path.name
        quantization_config = quantization_config or _dense_gguf(transformers)
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        config = transformers.AutoConfig.from_pretrained(name, **source)
        stored = getattr(config, "quantization_config", None)
        if quantization_config is not None:
            options["quantization_config"] = quantization_config
        if stored is not None or (quantization_config is not None and "gguf_file" not in source):
            options["device_map"] = {"": device}  # quantised weights are packed where they will run
        loader = _loader_for(transformers, config)
        model: nn.Module = loader.from_pretrained(name, **source, **options)
    except (OSError, ValueError, RuntimeError, ImportError, NotImplementedError) as error:
        raise BadInput(
            f"the target could not be loaded on {device} ({_first_line(error)})",
            where=str(name_or_path),
            fix="check the path, the network, and whether this machine can run its number format",
        ) from error
    if "device_map" not in options:
        model = model.to(device)
    return model, _tokenizer(transformers, name, source)


def _loader_for(transformers: Any, config: Any) -> Any:
    """The text-only auto class where the architecture has one, else the image-text one."""
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM
    if type(config) in transformers.AutoModelForImageTextToText._model_mapping:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM  # its error names what is missing


def _dense_gguf(transformers: Any) -> Any:
    """Unpack GGUF blocks to dense weights: newer transformers keeps them packed unless told."""
    return transformers.GgufConfig(dequantize=True) if hasattr(transformers, "GgufConfig") else None


def _tokenizer(transformers: Any, name: str, source: dict[str, Any]) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(name, **source)
    except (OSError, ValueError, ImportError, KeyError):
        return None  # a target can be run without one; its fingerprint is then absent


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
